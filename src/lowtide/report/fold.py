"""Identical layers folded into one row: "blocks.0-31.mlp" for 32 things that differ in a number only."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import Generic, Protocol, TypeVar

__all__ = ["Fold", "fold", "ranges"]


class Sized(Protocol):
    """What can be folded has bytes."""

    @property
    def bytes(self) -> int: ...


T = TypeVar("T", bound=Sized)
_NUMBER = re.compile(r"([0-9]+)")
_PART = re.compile(r"(?:(?<=\.)|(?<=^))([0-9]+)(?=\.|$)")
_LONGEST = 9
"""Longer runs of digits are hashes or dates, not layers."""


_MOST_RANGES = 6
"""Ranges shown of a path; more are cut."""


@dataclass(frozen=True, slots=True)
class Fold(Generic[T]):
    """Things alike in everything but the layer; `where` is their path, with the layers as ranges."""

    where: str
    members: tuple[T, ...]

    @property
    def bytes(self) -> int:
        """The bytes of all members."""
        return sum(member.bytes for member in self.members)


def fold(items: Iterable[T], *, path: Callable[[T], str], alike: Callable[[T], Hashable]) -> list[Fold[T]]:
    """The items in groups that are alike and whose paths differ in numbers only, in order of appearance."""
    groups: dict[Hashable, list[tuple[tuple[int, ...], T]]] = defaultdict(list)
    for item in items:
        pattern, numbers = _split(path(item))
        groups[pattern, alike(item)].append((numbers, item))
    return [
        Fold(_join(key[0], [numbers for numbers, _ in found]), tuple(item for _, item in found))  # type: ignore[index]
        for key, found in groups.items()
    ]


def ranges(numbers: Iterable[int]) -> str:
    """Whole numbers as ranges.

    >>> ranges([3, 0, 1, 2, 7])
    '0-3,7'
    """
    found = sorted(set(numbers))
    parts: list[str] = []
    for _, run in groupby(enumerate(found), key=lambda pair: pair[1] - pair[0]):
        first, *rest = [number for _, number in run]
        parts.append(f"{first}-{rest[-1]}" if rest else f"{first}")
    if len(parts) > _MOST_RANGES:
        parts[_MOST_RANGES - 1 : -1] = ["…"]
    return ",".join(parts)


def _split(path: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The text around the numbers of a path, and the numbers.

    Where parts of a dotted path are whole numbers only those count: `layer1.0.conv2` is not `layer2.0.conv1`.
    """
    parts = _PART.split(path)
    if len(parts) == 1:
        parts = _NUMBER.split(path)
    if max(map(len, parts[1::2]), default=0) > _LONGEST:
        return (path,), ()
    return tuple(parts[::2]), tuple(map(int, parts[1::2]))


def _join(pattern: Sequence[str], numbers: Sequence[tuple[int, ...]]) -> str:
    """The path with ranges in place of its numbers; stars where ranges would say too much."""
    columns = [sorted(set(column)) for column in zip(*numbers, strict=True)]
    full = prod(map(len, columns)) == len(set(numbers))
    fills = [ranges(column) if full or len(column) == 1 else "*" for column in columns]
    return pattern[0] + "".join(fill + text for fill, text in zip(fills, pattern[1:], strict=True))
