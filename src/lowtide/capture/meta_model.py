"""A model on the meta device, planned as if it were on the CPU.

Some operators have no derivative on the meta device (cross-entropy, resizing), so a trace of it would lack
most of its backward. While a plan is made, fake tensors stand in for those of the model and the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .._torch import private, private_of

__all__ = ["fakes_for_meta"]


@contextmanager
def fakes_for_meta(model: Callable[..., Any], inputs: Any) -> Iterator[Any]:
    """The inputs, as fake tensors where the model or they have any on the meta device; so is the model."""
    if not isinstance(model, torch.nn.Module):
        yield inputs  # what a function holds on to cannot be seen: capture refuses meta tensors there
        return
    modules = list(model.modules())
    tables: list[dict[str, Any]] = [
        table
        for module in modules
        for table in (private_of(module, "parameters"), private_of(module, "buffers"))
    ]
    kept = [dict(table) for table in tables]
    leaves = [*private("tree_leaves")(inputs), *(tensor for table in kept for tensor in table.values())]
    if not any(isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in leaves):
        yield inputs
        return
    fake = _Fakes()
    try:
        for table in tables:
            # In the modules' own tables: setattr would run hooks and properties of the user's.
            table.update({name: fake(tensor) for name, tensor in table.items() if tensor is not None})
        yield private("tree_map_only")(torch.Tensor, fake, inputs)
    finally:
        for table, tensors in zip(tables, kept, strict=True):
            table.update(tensors)


class _Fakes:
    """A fake tensor for each tensor, the same one for the same one; the CPU's for one on the meta device."""

    def __init__(self) -> None:
        self.mode = private("FakeTensorMode")()
        self.made: dict[int, torch.Tensor] = {}

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self.made:
            self.made[id(tensor)] = self.make(tensor)
        return self.made[id(tensor)]

    def make(self, tensor: torch.Tensor) -> torch.Tensor:
        device = "cpu" if tensor.is_meta else tensor.device
        with self.mode:
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        if isinstance(tensor, torch.nn.Parameter):
            return torch.nn.Parameter(fake, requires_grad=tensor.requires_grad)
        return fake.requires_grad_(tensor.requires_grad)
