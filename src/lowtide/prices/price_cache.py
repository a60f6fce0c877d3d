"""Measured prices, remembered in the user's cache folder as JSON.

One file per device, torch version and choice of kernels: other kernels take other times and workspaces. A
file is data that may be wrong: one entry that cannot be a price, or that makes an output smaller than the
tensor in it, and the whole file is left aside, by name, and measured anew.

Each capture asks for the list of its device, and a list may have some 10^4 prices. So what a file was found
to hold is kept, and read again where the file is another one; and so is the text of each price.
"""

from __future__ import annotations

import json
import logging
import re
from dataclasses import astuple, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ..capture.kernel_outputs import Output, Outputs
from ..devices.table import describe
from ..files.cache_folder import NoCache, private_folder
from ..files.plain_text import plain
from ..files.whole_files import read_private, write_whole
from ..plans import json_format

__all__ = ["Price", "PriceList"]

_VERSION = 2  # 2 has the layout of each output; a file of another version is measured anew

MOST_FILE_BYTES = 1 << 26
"""Of a file: some 10^5 prices, more than the steps of a machine have."""

MOST_SECONDS, MOST_BYTES = 1e5, 1 << 50
"""Of one op: a day, and more than any machine has."""


@dataclass(frozen=True, slots=True)
class Price:
    """Seconds (None: the op would not run alone), workspace bytes and how each output lies in memory."""

    seconds: float | None
    workspace: int
    outputs: Outputs | None


@dataclass
class PriceList:
    """Prices by signature; a file that cannot be believed counts as an empty one and is written anew.

    `path` is None where there is no cache; `read` are the signatures that come from the file.
    """

    path: Path | None
    prices: dict[str, Price] = field(default_factory=dict)
    fresh: bool = False
    read: set[str] = field(default_factory=set)

    @classmethod
    def load(cls, device: torch.device) -> PriceList:
        """The list of a device."""
        try:
            path = private_folder("prices") / f"{_name(device)}.json"
        except NoCache:  # that was said
            return cls(None)
        try:
            prices = _prices_in(path)
        except FileNotFoundError:
            prices = {}
        except (OSError, ValueError) as error:
            _say_not_believed(path, str(error))
            prices = {}
        return cls(path, prices, read=set(prices))

    def distrust(self, key: str) -> None:
        """Forget all that the file said: it is wrong about the op of this signature."""
        assert self.path is not None
        _say_not_believed(self.path, f"it has an output of {key} that is smaller or larger than its tensor")
        self.prices = {key: price for key, price in self.prices.items() if key not in self.read}
        self.read = set()

    def __contains__(self, key: str) -> bool:
        return key in self.prices

    def __getitem__(self, key: str) -> Price:
        return self.prices[key]

    def __setitem__(self, key: str, price: Price) -> None:
        self.prices[key] = price
        self.fresh = True

    def save(self) -> None:
        """Write what is new; a folder that cannot be written to only costs the next measurement."""
        if not self.fresh or self.path is None:
            return
        prices = ", ".join(_text(key, price) for key, price in self.prices.items())
        text = f'{{"lowtide": "prices", "version": {_VERSION}, "prices": {{{prices}}}}}'
        try:
            write_whole(self.path, text.encode(), mode=0o600)
            _HELD[self.path] = _stamp(self.path), dict(self.prices)
        except OSError:
            return
        self.fresh = False


def _name(device: torch.device) -> str:
    words = [describe(device), f"torch{torch.__version__}"]
    if device.type == "cpu":
        # Times on a CPU are those of a number of threads; on a GPU, of the kernels that its settings choose.
        words.insert(1, f"{torch.get_num_threads()}threads")
    else:
        words += _kernels()
    return re.sub(r"[^A-Za-z0-9.]+", "-", "-".join(words))


def _kernels() -> list[str]:
    """The settings of torch by which a GPU runs other kernels than by default."""
    backends = torch.backends
    settings = {
        "benchmark": backends.cudnn.benchmark,
        "deterministic": backends.cudnn.deterministic or torch.are_deterministic_algorithms_enabled(),
        "tf32 products": backends.cuda.matmul.fp32_precision == "tf32",
        "ieee convolutions": backends.cudnn.conv.fp32_precision != "tf32",  # type: ignore[attr-defined]
    }
    return [name for name, on in settings.items() if on]


_HELD: dict[Path, tuple[tuple[int, ...], dict[str, Price]]] = {}
"""What this process found in a file, or wrote to it, and which state of the file that was."""

_TEXTS: dict[str, tuple[Price, str]] = {}


def _stamp(path: Path) -> tuple[int, ...]:
    """What is another one after each change of a file, of its owner and of who may write to it."""
    found = path.lstat()
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _prices_in(path: Path) -> dict[str, Price]:
    """The prices in a file, which is read where it is not the one that was read last."""
    stamp = _stamp(path)
    if path not in _HELD or _HELD[path][0] != stamp:
        _HELD[path] = stamp, _read_file(path)
    return dict(_HELD[path][1])


def _text(key: str, price: Price) -> str:
    """A price as it stands in a file."""
    if key not in _TEXTS or _TEXTS[key][0] is not price:
        _TEXTS[key] = price, f"{json.dumps(key)}: {json.dumps(_written(price))}"
    return _TEXTS[key][1]


def _written(price: Price) -> list[object]:
    outputs = None if price.outputs is None else [output and astuple(output) for output in price.outputs]
    return [price.seconds, price.workspace, outputs]


def _read_file(path: Path) -> dict[str, Price]:
    """The prices in a file; raises ValueError with the first thing that is wrong in it."""
    data = json_format.parse(json_format.decode(read_private(path, MOST_FILE_BYTES), "prices"), "prices")
    json_format.check_header(data, "prices", _VERSION, ("prices",))
    prices = data.get("prices")
    if not isinstance(prices, dict):
        raise ValueError(f"prices: expected an object, found {type(prices).__name__}")
    return {key: _read(item, key) for key, item in prices.items()}


def _read(item: Any, key: str) -> Price:
    if not isinstance(item, list) or len(item) != 3:
        raise ValueError(f"{key}: not a price")
    seconds, workspace, outputs = item
    if seconds is not None and not _is_seconds(seconds):
        raise ValueError(f"{key}: {seconds!r} are no seconds of an op")
    if not _is_count(workspace, MOST_BYTES):
        raise ValueError(f"{key}: {workspace!r} are no bytes of a workspace")
    if outputs is not None and not isinstance(outputs, list):
        raise ValueError(f"{key}: outputs: expected a list or nothing")
    found = None if outputs is None else tuple(_read_output(output, key) for output in outputs)
    return Price(None if seconds is None else float(seconds), workspace, found)


def _is_seconds(number: Any) -> bool:
    """Whether that long an op may take: NaN is no time, and one of 1e308 would make all sums infinite."""
    return type(number) in (int, float) and 0 <= number <= MOST_SECONDS


def _is_count(number: Any, most: int) -> bool:
    return type(number) is int and 0 <= number <= most


def _read_output(item: Any, key: str) -> Output | None:
    if item is None:
        return None
    if not isinstance(item, list) or len(item) != 5:
        raise ValueError(f"{key}: not an output")
    size, stride, offset, shares, lazy = item
    strided = isinstance(stride, list) and all(_is_count(step, MOST_BYTES) for step in stride)
    owned = shares is None or type(shares) is int
    counted = _is_count(size, MOST_BYTES) and _is_count(offset, MOST_BYTES)
    if not (counted and strided and owned and lazy in ("", "~", "-", "~-")):
        raise ValueError(f"{key}: not an output of an op")
    return Output(size, tuple(stride), offset, shares, lazy)


@cache
def _say_not_believed(path: Path, reason: str) -> None:
    logging.getLogger("lowtide").warning(
        "the prices in %s are not used, and measured anew: %s", path, plain(reason)
    )
