"""Fake tensors of a rehearsed step: how they are made, found in containers, cast and counted."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .._torch import private, private_of, storage_key
from ..devices.allocator import rounded
from ..measuring.tracker import live_storages
from .rehearsed_branches import RehearsedBranches

__all__ = [
    "FakeStorages",
    "bytes_of",
    "cast",
    "copied",
    "input_dtype",
    "like",
    "map_tensors",
    "saving_nothing",
    "tensors_in",
    "tree_leaves",
]

tree_leaves, map_tensors = private("tree_leaves"), private("tree_map_only")


class FakeStorages(live_storages):
    """Counts fake tensors; those of the model's state are counted elsewhere."""

    def __init__(self, device: torch.device, note: Callable[[], None]) -> None:
        super().__init__(device)
        self.branches = RehearsedBranches()
        self.noted = note
        self.counts = True
        self.unseen: list[weakref.ref[torch.UntypedStorage]] = []

    def storage(self, tensor: Any) -> torch.UntypedStorage | None:
        if not isinstance(tensor, torch.Tensor) or tensor.device.type != self.device.type:
            return None
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter, private("FakeTensor")):
            return None
        return tensor.untyped_storage() if tensor.layout == torch.strided else None

    def call(self, operator: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        said = self.branches.answer(operator, args)
        if said is not None:
            return said
        result = self.counted(operator, args, kwargs)
        self.branches.note(operator, args, kwargs, result)
        return result

    def counted(self, operator: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self.counts:
            return super().call(operator, args, kwargs)
        result = operator(*args, **kwargs)
        made = [self.storage(leaf) for leaf in tree_leaves(result)]
        self.unseen += [weakref.ref(storage) for storage in made if storage is not None]
        return result

    def note_peak(self) -> None:
        super().note_peak()
        self.noted()

    @property
    def alive(self) -> int:
        """The bytes that are alive now."""
        return self.input_bytes + self.made

    def leave_out(self, tensor: torch.Tensor) -> None:
        """Count a storage as nothing."""
        self.known.setdefault(storage_key(tensor), 0)

    @contextmanager
    def looking_away(self) -> Iterator[None]:
        """Count nothing for a while."""
        self.counts = False
        try:
            yield
        finally:
            self.counts = True

    def count_what_stayed(self) -> dict[int, int]:
        """Count what was made while nobody looked and is still there: a cache of keys and values, say."""
        found: dict[int, int] = {}
        for storage in (ref() for ref in self.unseen):
            if storage is not None:
                with private("without_modes")():
                    whole = torch.empty(0, dtype=torch.uint8, device="meta").set_(storage)  # type: ignore[call-overload]
                if (key := storage_key(whole)) not in self.known:
                    found[key] = self.known[key] = rounded(storage.nbytes(), self.device)
                    self.made += found[key]
                    weakref.finalize(storage, self.forget, key)
        self.unseen.clear()
        return found


def input_dtype(state: Any) -> torch.dtype | None:
    """What FSDP casts the inputs of a module to, None where it does not."""
    policy = private_of(state, "fsdp_precision")
    return policy.param_dtype if policy.cast_forward_inputs else None


def cast(dtype: torch.dtype | None, tree: Any) -> Any:
    """What FSDP does with inputs and outputs under a policy of mixed precision."""
    if dtype is None:
        return tree
    return map_tensors(torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, tree)


def saving_nothing() -> Any:
    """Let autograd save sizes alone: what a unit leaves in a cache would keep all that led to it."""

    def pack(tensor: torch.Tensor) -> tuple[Any, ...]:
        return tensor.shape, tensor.stride(), tensor.dtype, tensor.device

    def unpack(packed: tuple[Any, ...]) -> torch.Tensor:
        shape, stride, dtype, device = packed
        return torch.empty_strided(shape, stride, dtype=dtype, device=device)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def like(tensor: torch.Tensor) -> torch.Tensor:
    """A new tensor like another one, in a storage as large: a plan counts all that a view looks at."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
        return torch.empty_like(tensor)
    items = tensor.untyped_storage().nbytes() // tensor.itemsize
    block = torch.empty(items, dtype=tensor.dtype, device=tensor.device)
    return block.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def copied(tree: Any) -> Any:
    """Other tensors like those of a tree, with a history of their own where these have one."""

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        made = tensor.detach().requires_grad_(tensor.requires_grad)
        return made if tensor.is_leaf else made.clone()

    return map_tensors(torch.Tensor, copy, tree)


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors of a nest of containers, dataclasses included."""
    found: list[torch.Tensor] = []
    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif hasattr(leaf, "__dataclass_fields__"):
            found += tensors_in([getattr(leaf, name) for name in leaf.__dataclass_fields__])
    return found


def bytes_of(tensors: Any, device: torch.device) -> int:
    """The bytes of the storages of tensors, each once."""
    sizes = {storage_key(t): t.untyped_storage().nbytes() for t in tensors if t.layout == torch.strided}
    return sum(rounded(size, device) for size in sizes.values())
