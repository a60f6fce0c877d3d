"""The truth about a step: its peak bytes and its seconds, on each device.

On CUDA the caching allocator's own statistics. On the CPU a tracker of live storages: every storage that
the step touches, counted from the moment an operator returns it (or from the start, when it was there
before) until it is freed, with its size in bytes. Code that Inductor generated makes its buffers and
reads its inputs without an operator; while a step is measured, the two functions of torch that it calls for
this, one that allocates and one that checks a tensor's layout, tell the tracker as well.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from ._torch import generated_modules, private
from .allocator import rounded
from .modes import in_place_of_operators

__all__ = ["Measurement", "measure"]

_leaves = private("tree_leaves")


class Measurement(NamedTuple):
    """What a step took: peak bytes and seconds.

    >>> import lowtide, torch
    >>> peak, seconds = lowtide.measure(lambda: torch.ones(1000).sum(), device="cpu")
    >>> peak
    4004
    """

    peak: int
    seconds: float


def measure(
    step: Callable[[], Any],
    *,
    device: torch.device | str | None = None,
    resident: Iterable[torch.Tensor] = (),
) -> Measurement:
    """Run a step once and give its peak bytes and its seconds.

    `resident` names tensors to count even if the step does not touch them (optimizer state, say); on CUDA
    everything that is allocated counts anyway. The device is CUDA where tensors are on one, else the CPU.
    On CUDA the allocator's peak statistics are reset.

    >>> import lowtide, torch
    >>> w = torch.ones(1000, requires_grad=True)
    >>> lowtide.measure(lambda: (w * 2).sum().backward(), device="cpu").peak
    8008
    """
    where = _default_device() if device is None else torch.device(device)
    return _on_cuda(step, where) if where.type == "cuda" else _on_cpu(step, resident)


def _default_device() -> torch.device:
    on_cuda = torch.cuda.is_available() and torch.cuda.is_initialized() and torch.cuda.memory_allocated()
    return torch.device("cuda" if on_cuda else "cpu")


def _on_cuda(step: Callable[[], Any], device: torch.device) -> Measurement:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    start = time.perf_counter()
    step()
    torch.cuda.synchronize(device)
    seconds = time.perf_counter() - start
    return Measurement(torch.cuda.max_memory_allocated(device), seconds)


def _on_cpu(step: Callable[[], Any], resident: Iterable[torch.Tensor]) -> Measurement:
    tracker = live_storages()
    for tensor in resident:
        tracker.give(tensor)
    with generated_code_tells(tracker):
        start = time.perf_counter()
        with tracker.mode:
            step()
        seconds = time.perf_counter() - start
    return Measurement(tracker.peak, seconds)


def storage_key(tensor: torch.Tensor) -> int:
    """What tells storages that are alive apart."""
    return int(tensor.untyped_storage()._cdata)


class live_storages:  # noqa: N801  # a noun that is used like a function
    """Counts the bytes of storages that are alive on a device, as its allocator rounds them."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.mode = in_place_of_operators(self.call)
        self.known: dict[int, int] = {}
        self.given = 0
        self.made = 0
        self.made_peak = 0

    @property
    def peak(self) -> int:
        """The largest number of bytes alive at once: what was there before plus the most that was made."""
        return self.given + self.made_peak

    def give(self, tensor: torch.Tensor) -> None:
        """Count a storage that is there from the start."""
        storage = self.storage(tensor)
        if storage is not None and storage._cdata not in self.known:
            self.given += self.size(tensor)
            self.remember(storage)

    def make(self, tensor: torch.Tensor) -> None:
        """Count a storage that an operator returned."""
        storage = self.storage(tensor)
        if storage is not None and storage._cdata not in self.known:
            self.made += self.size(tensor)
            self.remember(storage)

    def storage(self, tensor: Any) -> torch.UntypedStorage | None:
        """The storage of a tensor, where it counts here."""
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.device.type != self.device.type:
            return None
        return tensor.untyped_storage() if tensor.layout == torch.strided else None

    def size(self, tensor: torch.Tensor) -> int:
        """The bytes that the storage of a tensor takes on the device."""
        return rounded(tensor.untyped_storage().nbytes(), self.device)

    def remember(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, rounded(storage.nbytes(), self.device)
        self.known[key] = size
        weakref.finalize(storage, self.forget, key, size)

    def forget(self, key: int, size: int) -> None:
        self.known.pop(key, None)
        self.made -= size

    def note_peak(self) -> None:
        self.made_peak = max(self.made_peak, self.made)

    def call(self, operator: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call an operator, and count what it reads and what it gives."""
        for leaf in _leaves((args, kwargs)):
            self.give(leaf)
        result = operator(*args, **kwargs)
        for leaf in _leaves(result):
            self.make(leaf)
        self.note_peak()
        return result


@contextmanager
def generated_code_tells(tracker: live_storages) -> Iterator[None]:
    """Let code that Inductor generated, loaded before or meanwhile, tell what it makes and reads."""

    def make(buffer: torch.Tensor) -> None:
        tracker.make(buffer)
        tracker.note_peak()

    with (
        _telling("_empty_strided_cpu", "empty_strided_cpu", lambda _, buffer: make(buffer)),
        _telling("assert_size_stride", "assert_size_stride", lambda arguments, _: tracker.give(arguments[0])),
    ):
        yield


@contextmanager
def _telling(name: str, alias: str, tell: Callable[[tuple[Any, ...], Any], None]) -> Iterator[None]:
    """Let a function of torch tell of its calls, also those by its alias in generated code."""
    home, silent = private("guards"), getattr(private("guards"), name)
    measuring = True

    def telling(*arguments: Any) -> Any:
        result = silent(*arguments)
        if measuring:  # a module that was unloaded meanwhile keeps this function for good
            tell(arguments, result)
        return result

    setattr(home, name, telling)
    _give_generated_code(alias, telling)
    try:
        yield
    finally:
        measuring = False
        setattr(home, name, silent)
        _give_generated_code(alias, silent)


def _give_generated_code(alias: str, function: Any) -> None:
    for module in generated_modules():
        if hasattr(module, alias):  # whatever stands there: a module may have been away and come back
            setattr(module, alias, function)
