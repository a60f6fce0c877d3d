"""What the texts of compiled graphs call by name, on tensors without data."""

from __future__ import annotations

import ast
import functools
import operator
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["ARITHMETIC", "CHORES", "LIBRARIES", "METHODS", "PURE", "Shape"]

Shape = tuple[int, ...]


def extent(size: Shape, stride: Shape) -> int:
    """How many elements of a storage a tensor reaches over."""
    return 0 if 0 in size else 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))


def elements(tensor: torch.Tensor) -> int:
    """How many elements fit into a tensor's storage."""
    return tensor.untyped_storage().nbytes() // tensor.element_size()


def empty(size: Shape, stride: Shape, *, dtype: torch.dtype, device: str = "") -> torch.Tensor:
    """A tensor without data; on whatever device the text has it, here it is on "meta"."""
    return torch.empty_strided(size, stride, dtype=dtype, device="meta")


def on_meta(argument: Any) -> Any:
    """An argument of an operator, with its device replaced."""
    return torch.device("meta") if isinstance(argument, torch.device) else argument


def from_pool(
    pool: torch.Tensor, offset: int, dtype: torch.dtype, size: Shape, stride: Shape
) -> torch.Tensor:
    """A tensor somewhere in another one's storage; the offset is in bytes."""
    made = torch.empty(0, dtype=dtype, device="meta")
    return made.set_(pool.untyped_storage(), offset // made.element_size(), size, stride)


@functools.cache
def find_operator(name: str) -> Any:
    """The operator of `torch.ops.aten.sort.stable`, `aten.index_put_` or `extern_kernels.convolution`."""
    library, _, path = name.removeprefix("torch.ops.").partition(".")
    namespace = {"extern_kernels": "aten", "inductor_ops": "inductor"}.get(library, library)
    return operator.attrgetter(f"{namespace}.{path}")(torch.ops)


METHODS = ("as_strided", "sum", "to", "view")
LIBRARIES = ("torch.ops.", "aten.", "extern_kernels.", "inductor_ops.", "_quantized.")

ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}

PURE: dict[str, Callable[..., Any]] = {
    "reinterpret_tensor": torch.as_strided,
    "torch.as_strided": torch.as_strided,
    "alloc_from_pool": from_pool,
    "rand_strided": empty,
    "device": torch.device,
    "copy_if_misaligned": lambda tensor: tensor,  # only a view that the user cut himself can be misaligned
    "max": max,
    "min": min,
}

CHORES = {
    "assert_alignment",
    "current_stream",
    "end_graph",
    "Event",
    "get_external_object_by_index",
    "get_raw_stream",
    "range_pop",
    "range_push",
    "record",
    "run_intermediate_hooks",
    "set_device",
    "start_graph",
    "synchronize",
}
