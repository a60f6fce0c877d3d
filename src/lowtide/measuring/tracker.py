"""A tracker of live storages: the truth about the CPU's memory, and about one op's on any device.

Every storage that a step touches is counted from the moment an operator returns it (or from the start, when
it was there before) until it is freed, with its size in bytes. Code that Inductor generated makes its buffers
and reads its inputs without an operator; while a step is measured, the two functions of torch that it calls
for this, one that allocates and one that checks a tensor's layout, tell the tracker as well. A storage may be
resized where it is, past every operator: FSDP frees parameters so and takes memory for them again. That is
told, too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .._torch import generated_modules, in_process_group, inner_tensors, private, storage_key
from ..devices.allocator import rounded
from ..devices.per_tensor import is_stepping
from ..torch_state.dispatch_modes import in_place_of_operators

__all__ = ["collectives_tell", "generated_code_tells", "live_storages", "resized_storages_tell"]

_leaves = private("tree_leaves")


class live_storages:  # noqa: N801  # a noun that is used like a function
    """Counts the bytes of storages that are alive on a device, as its allocator rounds them."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.mode = in_place_of_operators(self.call)
        self.known: dict[int, int] = {}
        self.input_bytes = 0
        self.made = 0
        self.made_peak = 0
        self.in_collective = False

    @property
    def peak(self) -> int:
        """The largest number of bytes alive at once: what was there before plus the most that was made."""
        return self.input_bytes + self.made_peak

    def give(self, tensor: torch.Tensor) -> None:
        """Count a storage that is there from the start."""
        storage = self.storage(tensor)
        if storage is not None and storage_key(tensor) not in self.known:
            self.input_bytes += self.size(tensor)
            self.remember(tensor, storage)

    def make(self, tensor: torch.Tensor) -> None:
        """Count a storage that an operator returned."""
        storage = self.storage(tensor)
        if storage is not None and storage_key(tensor) not in self.known:
            self.made += self.size(tensor)
            self.remember(tensor, storage)

    def storage(self, tensor: Any) -> torch.UntypedStorage | None:
        """The storage of a tensor, where it counts here."""
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.device.type != self.device.type:
            return None
        return tensor.untyped_storage() if tensor.layout == torch.strided else None

    def size(self, tensor: torch.Tensor) -> int:
        """The bytes that the storage of a tensor takes on the device."""
        return rounded(tensor.untyped_storage().nbytes(), self.device)

    def remember(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> None:
        key = storage_key(tensor)
        self.known[key] = rounded(storage.nbytes(), self.device)
        # Freed is what no reference holds any more, whoever held it: autograd, Python, a cache.
        weakref.finalize(storage, self.forget, key)

    def forget(self, key: int) -> None:
        self.made -= self.known.pop(key, 0)

    def resize(self, tensor: torch.Tensor) -> None:
        """Count a storage as large as it is now; what it was before is known, or was nothing."""
        storage, key = self.storage(tensor), storage_key(tensor)
        if storage is None:
            return
        if key not in self.known:
            self.known[key] = 0
            weakref.finalize(storage, self.forget, key)
        now = self.size(tensor)
        self.made += now - self.known[key]
        self.known[key] = now
        self.note_peak()

    def note_peak(self) -> None:
        self.made_peak = max(self.made_peak, self.made)

    def call(self, operator: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call an operator, and count what it reads and what it gives."""
        for tensor in _tensors((args, kwargs)):
            # What an operator reads and nobody has made under this mode was there before; but a collective
            # on the CPU has scratch memory of its own, which it makes past every operator, and an optimizer
            # makes tensors of a number so.
            made = self.in_collective or (not tensor.ndim and is_stepping())
            self.make(tensor) if made else self.give(tensor)
        result = operator(*args, **kwargs)
        for tensor in _tensors(result):
            self.make(tensor)
        self.note_peak()
        return result


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors of a tree; of one that is made of others, as a DTensor, those."""
    for leaf in _leaves(tree):
        yield from inner_tensors(leaf).values()


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
def resized_storages_tell(tracker: live_storages) -> Iterator[None]:
    """Let storages that are resized where they are tell their new size."""
    kind, silent = torch.UntypedStorage, torch.UntypedStorage.resize_
    inherited = "resize_" not in vars(kind)

    def resize(storage: torch.UntypedStorage, size: int) -> Any:
        with private("without_modes")():  # looking at it is no operator of the step
            whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]
        if storage.nbytes():
            tracker.give(whole)  # it was there, whether or not an operator has read it
        result = silent(storage, size)
        tracker.resize(whole)
        return result

    kind.resize_ = resize  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        if inherited:
            del kind.resize_
        else:
            kind.resize_ = silent  # type: ignore[method-assign]


@contextmanager
def collectives_tell(tracker: live_storages) -> Iterator[None]:
    """Let it be known when a collective is waited for: that is where it works on the CPU."""
    if not in_process_group():
        yield
        return
    kind, silent = torch.distributed.Work, torch.distributed.Work.wait

    def wait(*args: Any, **kwargs: Any) -> Any:
        tracker.in_collective = True
        try:
            return silent(*args, **kwargs)
        finally:
            tracker.in_collective = False

    kind.wait = wait  # type: ignore[method-assign]
    try:
        yield
    finally:
        kind.wait = silent  # type: ignore[method-assign]


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
