"""Inputs that change between the forward and the backward, where the backward recomputes from them.

Plain PyTorch keeps what the forward computed. A plan that recomputes it reads parameters, buffers and inputs
again, so what was written to them since would give other values. For those inputs are compared: the version,
which writes in place count up; the address, which `tensor.data = other` changes; and, on the CPU, three words
of the data, which show most writes through `.data` or a NumPy view. A write that leaves these alone, or one
on a GPU, cannot be seen (docs/limits.md). Of other inputs that the backward reads the address alone is
compared: their versions are autograd's own business, and what is written to them plain PyTorch reads, too.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import UnsupportedBackward

__all__ = ["Watch", "Watched"]

_WORD = 8
_word_at = ctypes.c_int64.from_address

Look = tuple[int, ...]


@dataclass(frozen=True)
class Watched:
    """An input that the backward reads: its place and what a user calls it.

    `again` says that values are recomputed from it; `size` is its bytes where their words can be looked at.
    """

    place: int
    name: str
    again: bool = True
    size: int = 0

    @classmethod
    def of(cls, place: int, name: str, tensor: torch.Tensor, *, again: bool) -> Watched:
        """The words of a dense tensor on the CPU can be looked at; `tensor` may be a fake one."""
        seen = tensor.device.type == "cpu" and tensor.layout == torch.strided and tensor.is_contiguous()
        return cls(place, name, again, tensor.nbytes if again and seen and tensor.nbytes >= _WORD else 0)

    @property
    def words(self) -> Look:
        """Where the words are: at the start, in the middle and at the end."""
        last = self.size - _WORD
        return (0, last // 2 // _WORD * _WORD, last) if self.size else ()


class Watch:
    """Looks at some inputs of a step when its forward has run, and again when its backward is about to."""

    def __init__(self, inputs: Sequence[Watched] = ()) -> None:
        self.inputs = tuple(inputs)
        self.looks = [(each.again, each.size, each.words) for each in inputs]

    def after_forward(self, args: Sequence[Any]) -> Callable[[Any], None] | None:
        """What to call before the backward of this call; None where it reads no input.

        It lets go of the inputs when the backward begins, as that does of what it saved.
        """
        if not self.inputs:
            return None
        tensors = [args[each.place] for each in self.inputs]
        before = self.look(tensors)

        def before_backward(_: Any) -> None:
            now = self.look(tensors)
            if now != before:
                self.refuse(tensors, before, now)
            tensors.clear()

        return before_backward

    def look(self, tensors: Sequence[Any]) -> list[Look]:
        """What is seen of each; a fraction of a microsecond per tensor."""
        return [look(tensor, *kind) for tensor, kind in zip(tensors, self.looks, strict=False)]

    def refuse(self, tensors: Sequence[Any], before: list[Look], now: list[Look]) -> None:
        """Raise for the first input whose change would show in the gradients."""
        for tensor, each, old, new in zip(tensors, self.inputs, before, now, strict=False):
            how = change(tensor, old, new)
            if how:
                raise UnsupportedBackward(
                    f"{each.name} {how} between the forward and its backward. {_why(each)} Change it before "
                    "the forward or after the backward, or lowtide.uncap the model."
                )


def look(tensor: Any, again: bool, size: int, words: Look) -> Look:
    """The address of a tensor; where values are recomputed from it, its version, and words if it has any."""
    try:
        address: int = tensor.data_ptr()
    except RuntimeError:  # a subclass, or a layout, that has no single storage
        address = 0
    if not again:
        return (address,)
    if not words or not address or tensor.nbytes != size:
        return address, tensor._version
    return (address, tensor._version, *[_word_at(address + word).value for word in words])


def change(tensor: torch.Tensor, old: Look, new: Look) -> str | None:
    """How an input changed, in words; None where that does not matter.

    Of a tensor that autograd computed, a saved one goes on to look at the old data when `.data` is replaced.
    """
    if old[1:2] != new[1:2]:
        return "was written to in place (by an optimizer's step, say)"
    if old[0] != new[0]:
        return "got other data (`.data = ...`)" if tensor.is_leaf else None
    return "was written to past autograd (through `.data` or a NumPy view)" if old != new else None


def _why(each: Watched) -> str:
    if not each.again:
        return "The backward would read the new data, where plain PyTorch reads the old behind views."
    return (
        "To stay under the budget, the backward recomputes from it what plain PyTorch would have kept, so "
        "the gradients would be wrong. A larger budget recomputes less."
    )
