"""One call of a compiled graph, and the bytes that are alive at it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from .calls import Shape

__all__ = ["Moment", "shapes_of"]


@dataclass(frozen=True)
class Moment:
    """One call of a compiled graph: a kernel, a library function or an operator.

    `bytes` are alive at that call, its results included: what the graph allocated less the inputs it freed.
    `outputs` are the shapes of what a library function or operator writes; a kernel's are not told.
    `inputs` are those of what an operator reads; `channels_last`: among them are images of that layout.
    """

    call: str
    bytes: int
    outputs: tuple[Shape, ...] = ()
    inputs: tuple[Shape, ...] = ()
    channels_last: bool = False

    @classmethod
    def of(cls, name: str, size: int, outputs: tuple[Shape, ...], read: Iterable[Any]) -> Moment:
        """A call by its name in the text, with what it is given."""
        read = [*read]
        return cls(_short(name), size, outputs, shapes_of(read), any(map(_has_channels_last, read)))


def shapes_of(values: Iterable[Any]) -> tuple[Shape, ...]:
    """The shapes of the tensors among some values."""
    return tuple(tuple(value.shape) for value in values if isinstance(value, torch.Tensor))


def _has_channels_last(value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or value.ndim != 4:
        return False
    return value.is_contiguous(memory_format=torch.channels_last) and not value.is_contiguous()


def _short(name: str) -> str:
    for ending in (".run", ".generated_kernel", ".default"):
        name = name.removesuffix(ending)
    return name.removeprefix("torch.ops.")
