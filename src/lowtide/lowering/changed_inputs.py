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
from functools import reduce
from typing import Any

import torch

from .._torch import private_of
from ..errors import UnsupportedBackward

__all__ = ["Watch", "Watched"]

_WORD = 8
_word_at = ctypes.c_int64.from_address


@dataclass(frozen=True)
class Watched:
    """An input that the backward reads: its place and what a user calls it.

    `again` says that values are recomputed from it; `size` is its bytes where their words can be looked at;
    `path` leads to a tensor that the input is made of, as a DTensor is of its local one.
    """

    place: int
    name: str
    again: bool = True
    size: int = 0
    path: tuple[str, ...] = ()

    @classmethod
    def of(cls, at: tuple[int, tuple[str, ...]], name: str, tensor: torch.Tensor, *, again: bool) -> Watched:
        """The words of a dense tensor on the CPU can be looked at; `tensor` may be a fake one."""
        seen = tensor.device.type == "cpu" and tensor.layout == torch.strided and tensor.is_contiguous()
        size = tensor.nbytes if again and seen and tensor.nbytes >= _WORD else 0
        return cls(at[0], name, again, size, at[1])


@dataclass(frozen=True)
class Seen:
    """What was seen of the inputs: addresses, versions of those recomputed from, words of some of these."""

    addresses: list[int]
    versions: list[int]
    words: list[int]


class Watch:
    """Looks at some inputs of a step when its forward has run, and again when its backward is about to.

    Both cost a fraction of a microsecond per tensor, so nothing is done tensor by tensor that can be done
    list by list: those with words come first, then the others that values are recomputed from.
    """

    def __init__(self, inputs: Sequence[Watched] = ()) -> None:
        # Sorted once, so that each look works on prefixes of one list.
        self.inputs = sorted(inputs, key=lambda each: (not each.size, not each.again))
        self.places = [each.place for each in self.inputs]
        self.paths = {index: each.path for index, each in enumerate(self.inputs) if each.path}
        self.again = sum(each.again for each in self.inputs)
        self.sizes = [each.size for each in self.inputs if each.size]
        self.known: tuple[list[int], list[Any]] = ([0] * len(self.sizes), [None] * (3 * len(self.sizes)))

    def after_forward(self, args: Sequence[Any]) -> Callable[[Any], None] | None:
        """What to call before the backward of this call; None where it reads no input.

        It lets go of the inputs when the backward begins, as that does of what it saved.
        """
        if not self.inputs:
            return None
        tensors = [args[place] for place in self.places]
        before = self.look(tensors)

        def before_backward(_: Any) -> None:
            now = self.look_again(tensors, before)
            if now != before:
                self.refuse(tensors, before, now)
            tensors.clear()

        return before_backward

    def look(self, tensors: Sequence[Any]) -> Seen:
        addresses = _addresses(self.plain(tensors))
        return Seen(addresses, self.versions(tensors), self.words(addresses[: len(self.sizes)]))

    def look_again(self, tensors: Sequence[Any], before: Seen) -> Seen:
        """What is seen now; words only where every tensor still is where and as large as it was."""
        plain = self.plain(tensors)
        addresses = _addresses(plain)
        worded = len(self.sizes)
        words, there = before.words, addresses[:worded]
        if there == before.addresses[:worded] and _sizes(plain[:worded]) == self.sizes:
            words = self.words(there)
        return Seen(addresses, self.versions(tensors), words)

    def plain(self, tensors: Sequence[Any]) -> Sequence[Any]:
        """The tensors that have data: of one that is made of others, the one that is read.

        What is written through the outer one counts up that one's version.
        """
        if not self.paths:
            return tensors
        return [reduce(getattr, self.paths.get(index, ()), tensor) for index, tensor in enumerate(tensors)]

    def versions(self, tensors: Sequence[Any]) -> list[int]:
        return [private_of(tensor, "version") for tensor in tensors[: self.again]]

    def words(self, addresses: list[int]) -> list[int]:
        """Three words of each tensor that has them; where they lie is remembered, since parameters stay."""
        if 0 in addresses:  # no memory to look at
            return []
        known, cells = self.known
        if known != addresses:
            cells = cells.copy()  # another thread may be reading
            for index, (old, new) in enumerate(zip(known, addresses, strict=True)):
                if old != new:
                    cells[3 * index : 3 * index + 3] = _cells(new, self.sizes[index])
            self.known = (addresses, cells)
        return [cell.value for cell in cells]

    def refuse(self, tensors: Sequence[Any], before: Seen, now: Seen) -> None:
        """Raise for the first input whose change would show in the gradients."""
        for index, each in enumerate(self.inputs):
            how = self.change(tensors[index], index, before, now)
            if how:
                raise UnsupportedBackward(
                    f"{each.name} {how} between the forward and its backward. {_why(each)} Change it before "
                    "the forward or after the backward, or lowtide.uncap the model."
                )

    def change(self, tensor: torch.Tensor, index: int, before: Seen, now: Seen) -> str | None:
        """How an input changed, in words; None where that does not matter.

        Of a tensor that autograd computed, a saved one goes on to look at the old data when `.data` is
        replaced.
        """
        if before.versions[index : index + 1] != now.versions[index : index + 1]:
            return "was written to in place (by an optimizer's step, say)"
        if before.addresses[index] != now.addresses[index]:
            return "got other data (`.data = ...`)" if tensor.is_leaf else None
        three = slice(3 * index, 3 * index + 3)
        past = before.words[three] != now.words[three]
        return "was written to past autograd (through `.data` or a NumPy view)" if past else None


def _addresses(tensors: Sequence[Any]) -> list[int]:
    try:
        return [tensor.data_ptr() for tensor in tensors]
    except RuntimeError:  # a subclass, or a layout, that has no single storage
        return [0 for _ in tensors]


def _sizes(tensors: Sequence[Any]) -> list[int]:
    return [tensor.nbytes for tensor in tensors]


def _cells(address: int, size: int) -> list[Any]:
    """The words at the start, in the middle and at the end of a tensor's data."""
    last = size - _WORD
    return [_word_at(address + place) for place in (0, last // 2 // _WORD * _WORD, last)]


def _why(each: Watched) -> str:
    if not each.again:
        return "The backward would read the new data, where plain PyTorch reads the old through views."
    return (
        "To stay under the budget, the backward recomputes from it what plain PyTorch would have kept, so "
        "the gradients would be wrong. A larger budget recomputes less."
    )
