"""How the user has set torch's CUDA caching allocator: `PYTORCH_ALLOC_CONF`, as far as it places blocks.

The words are torch's own: `max_split_size_mb`, `max_non_split_rounding_mb`, `large_segment_size_mb`,
`roundup_power2_divisions`, `expandable_segments`, `backend`. Others (pinned host memory, locks) place nothing
on the device. `garbage_collection_threshold` gives cached segments back before a limit is reached; it is left
out, as it takes nothing more of the device. torch checks the text when it starts; what is not understood here
has its default.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

__all__ = ["AllocatorSettings", "read_settings", "settings_of_environment"]

MIB = 2**20
_CLASSES = 16
"""Sizes with a rounding of their own: up to 2 MiB, up to 4, and so on; the last is of all from 32 GiB on."""

_OPTION = re.compile(r"([a-z_0-9]+):(\[[^\]]*\]|[^,\[\]]+)")


@dataclass(frozen=True)
class AllocatorSettings:
    """What decides where a request is placed; sizes in bytes.

    Blocks of `most_split` bytes and more are not split, and serve requests of that size up to `slack`
    smaller. `divisions` has for each class of sizes into how many steps a power of two is divided when a
    request is rounded up; 0 and 1 mean none. Without `native` another allocator serves requests, by rules
    of its own.
    """

    most_split: int | None = None
    slack: int = 20 * MIB
    shared_segment: int = 20 * MIB
    divisions: tuple[int, ...] = (0,) * _CLASSES
    expandable: bool = False
    native: bool = True

    def rounded(self, size: int) -> int:
        """The bytes that a request is rounded up to: 512, or a division of a power of two."""
        kind = min(max(size.bit_length() - 21, 0), _CLASSES - 1)
        parts = self.divisions[kind]
        if parts <= 1 or size <= 512 * parts:
            return max(-(-size // 512) * 512, 512)
        step = (1 << (size.bit_length() - 1)) // parts
        return -(-size // step) * step


def settings_of_environment() -> AllocatorSettings:
    """The settings that a process with this environment starts with."""
    names = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
    return read_settings(next((os.environ[name] for name in names if name in os.environ), ""))


def read_settings(text: str) -> AllocatorSettings:
    """The settings of a text such as "expandable_segments:True,roundup_power2_divisions:[256:1,>:8]".

    >>> read_settings("max_split_size_mb:128").most_split == 128 * 2**20
    True
    """
    found = dict(_OPTION.findall(re.sub(r"\s", "", text)))
    usual = AllocatorSettings()
    return AllocatorSettings(
        most_split=_mib(found, "max_split_size_mb", None),
        slack=_mib(found, "max_non_split_rounding_mb", usual.slack) or usual.slack,
        shared_segment=_mib(found, "large_segment_size_mb", usual.shared_segment) or usual.shared_segment,
        divisions=_divisions(found.get("roundup_power2_divisions", "0")),
        expandable=found.get("expandable_segments") == "True",
        native=found.get("backend", "native") == "native",
    )


def _mib(found: dict[str, str], name: str, default: int | None) -> int | None:
    text = found.get(name, "")
    return int(text) * MIB if text.isdecimal() else default


def _divisions(text: str) -> tuple[int, ...]:
    """One number for all sizes, or a list: to the first size, from each on, above the last one (`>`)."""
    if text.isdecimal():
        return (int(text),) * _CLASSES
    parts = [0] * _CLASSES
    last = None
    for size, number in re.findall(r"(\d+|>):(\d+)", text):
        if size == ">":
            first = 1 if last is None else last + 1
            parts[first:] = [int(number)] * (_CLASSES - first)
            continue
        kind = min(int(size).bit_length() - 1, _CLASSES - 1)
        if last is None:
            parts[:kind] = [int(number)] * kind
        parts[kind] = int(number)
        last = kind
    return tuple(parts)
