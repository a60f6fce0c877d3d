"""How the tensors that an operator returns lie in memory: strides, storage bytes, and whose storage it is.

A fake tensor foretells all of it while a step is traced, and is sometimes wrong: the CPU's BatchNorm returns
a contiguous result whatever the strides of its input, where the fake one keeps them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .._torch import private
from .fx_nodes import storage_of

__all__ = ["Output", "Outputs", "as_foretold", "items_of", "lazily", "lazy", "may_hold", "outputs_of", "same"]


@dataclass(frozen=True, slots=True)
class Output:
    """How one output of an op really lies in memory, which a fake tensor can only guess.

    `bytes` are those of its storage on the device, 0 for one elsewhere. `shares` tells whose storage it is:
    None its own, n that of the n-th tensor that the op reads, -n that of the n-th output, counted from 1.
    `lazy` is what is still to be done with its numbers when they are read, "~" conjugation or "-" negation:
    most kernels make a copy for it.
    """

    bytes: int
    stride: tuple[int, ...] = ()
    offset: int = 0
    shares: int | None = None
    lazy: str = ""

    @property
    def new(self) -> int:
        """The bytes that the op itself allocates for it."""
        return self.bytes if self.shares is None else 0


ELSEWHERE = 64
"""Bytes of an output that may lie on the host, as seeds do, and then count for none."""

MOST_PADDING, MOST_ADDED = 64, 1 << 20
"""By how much storage may exceed what an output needs of it. Chosen, far above what kernels do."""

Outputs = tuple[Output | None, ...]
"""One for each output of an op; None for what is not a tensor."""


def items_of(result: Any) -> list[Any]:
    """The outputs of an operator: one, or those of its tuple or list."""
    return list(result) if isinstance(result, list | tuple) else [result]


def lazy(tensor: torch.Tensor) -> str:
    """The signs of what is still to be done with a tensor's numbers when they are read."""
    return "~" * tensor.is_conj() + "-" * tensor.is_neg()


def lazily(tensor: torch.Tensor, signs: str) -> torch.Tensor:
    """The tensor with that still to be done with its numbers."""
    tensor = tensor.conj() if "~" in signs else tensor
    return private("neg_view")(tensor) if "-" in signs else tensor  # type: ignore[no-any-return]


def outputs_of(result: Any, reads: Sequence[torch.Tensor], device: torch.device | None = None) -> Outputs:
    """How what an operator returned lies in memory; storage elsewhere than on `device` has no bytes there."""
    # Reversed, so that of several reads with one storage the first is named.
    owner = {storage_of(tensor): index for index, tensor in reversed(list(enumerate(reads)))}
    found: list[Output | None] = []
    for index, item in enumerate(items_of(result)):
        if not isinstance(item, torch.Tensor) or item.layout != torch.strided:
            found.append(None)
            continue
        there = device is None or item.device.type == device.type
        size = item.untyped_storage().nbytes() if there else 0
        shares = owner.setdefault(storage_of(item), -index - 1)
        own = None if shares == -index - 1 else shares
        found.append(Output(size, tuple(item.stride()), int(item.storage_offset()), own, lazy(item)))
    return tuple(found)


def as_foretold(real: Outputs, fake: Any, reads: Sequence[torch.Tensor]) -> bool:
    """Whether outputs lie as the fake tensors of their op do, which reads fake tensors."""
    items = zip(real, outputs_of(fake, reads), items_of(fake), strict=True)
    return all(same(one, other, item.shape) for one, other, item in items if isinstance(item, torch.Tensor))


def same(real: Output | None, fake: Output | None, shape: Sequence[int]) -> bool:
    """Whether an output lies as was foretold; how dimensions of one element are strided means nothing.

    Some kernels return nothing where a mask says that an output is not wanted, and a fake one makes it.
    """
    if real is None or fake is None:
        return fake is None or fake.new == 0
    if 0 in shape and not real.bytes:  # nothing lies there, in whosever storage: of an empty input some
        return True  # kernels return the input itself
    if len(real.stride) != len(shape):  # the kernel's own scratch space, of which tracing knows no shape
        return _kept(real) == _kept(fake)
    steps = zip(real.stride, fake.stride, shape, strict=True)
    strided = all(left == right for left, right, size in steps if size > 1)
    return (0 in shape or (strided and real.offset == fake.offset)) and _kept(real) == _kept(fake)


def may_hold(real: Outputs | None, fake: Any) -> bool:
    """Whether storages of these bytes can be those of an op's outputs, by the shapes of its fake tensors.

    What was measured may be read from a file, and no file may make a tensor smaller than it is.
    """
    return real is None or all(map(_holds, real, items_of(fake)))


def _holds(output: Output | None, fake: Any) -> bool:
    # Of a kernel's own scratch space tracing knows no shape.
    if output is None or not isinstance(fake, torch.Tensor) or len(output.stride) != fake.ndim:
        return True
    if output.shares is not None or fake.numel() == 0:
        return True
    apart = math.prod(size for size, step in zip(fake.shape, fake.stride(), strict=True) if step)
    steps = zip(fake.shape, output.stride, strict=True)
    reach = output.offset + 1 + sum((size - 1) * step for size, step in steps)
    least = max(apart, reach) * fake.element_size()
    return least <= max(output.bytes, ELSEWHERE) and output.bytes <= MOST_PADDING * least + MOST_ADDED


def _kept(output: Output) -> tuple[object, ...]:
    return output.new, output.shares, output.lazy
