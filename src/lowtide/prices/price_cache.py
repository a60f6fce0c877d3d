"""Measured prices, remembered in the user's cache folder as JSON.

One file per device, torch version and choice of kernels: other kernels take other times and workspaces.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import astuple, dataclass, field
from pathlib import Path

import torch

from ..cache_folder import cache_folder
from ..capture.kernel_outputs import Output, Outputs
from ..devices.table import describe

__all__ = ["Price", "PriceList"]

_VERSION = 2  # 2 has the layout of each output; a file of another version is measured anew


@dataclass(frozen=True, slots=True)
class Price:
    """Seconds (None: the op would not run alone), workspace bytes and how each output lies in memory."""

    seconds: float | None
    workspace: int
    outputs: Outputs | None


@dataclass
class PriceList:
    """Prices by signature; an unreadable file counts as an empty one and is written anew."""

    path: Path
    prices: dict[str, Price] = field(default_factory=dict)
    fresh: bool = False

    @classmethod
    def load(cls, device: torch.device) -> PriceList:
        """The list of a device."""
        path = cache_folder() / "prices" / f"{_name(device)}.json"
        try:
            data = json.loads(path.read_text())
            if data["version"] != _VERSION:
                raise ValueError("prices of another version")
            prices = {key: _read(item) for key, item in data["prices"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            prices = {}
        return cls(path, prices)

    def __contains__(self, key: str) -> bool:
        return key in self.prices

    def __getitem__(self, key: str) -> Price:
        return self.prices[key]

    def __setitem__(self, key: str, price: Price) -> None:
        self.prices[key] = price
        self.fresh = True

    def save(self) -> None:
        """Write what is new; a folder that cannot be written to only costs the next measurement."""
        if not self.fresh:
            return
        data = {
            "lowtide": "prices",
            "version": _VERSION,
            "prices": {key: _written(price) for key, price in self.prices.items()},
        }
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # Written aside and renamed: other processes may read the list at this moment, and a crash leaves
            # no half of it.
            half = self.path.with_name(f"{self.path.name}.{os.getpid()}.part")
            half.write_text(json.dumps(data))
            half.replace(self.path)
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


def _written(price: Price) -> list[object]:
    outputs = None if price.outputs is None else [output and astuple(output) for output in price.outputs]
    return [price.seconds, price.workspace, outputs]


def _read(item: list[object]) -> Price:
    seconds, workspace, outputs = item
    if not isinstance(workspace, int) or not isinstance(seconds, int | float | None):
        raise ValueError(f"not a price: {item!r}")
    found = None if outputs is None else tuple(map(_read_output, outputs))  # type: ignore[call-overload]
    return Price(None if seconds is None else float(seconds), workspace, found)


def _read_output(item: list[object] | None) -> Output | None:
    if item is None:
        return None
    size, stride, offset, shares, lazy = item
    if not (isinstance(size, int) and isinstance(offset, int) and isinstance(shares, int | None)):
        raise ValueError(f"not an output: {item!r}")
    return Output(size, tuple(int(step) for step in stride), offset, shares, str(lazy))  # type: ignore[attr-defined]
