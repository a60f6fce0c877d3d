"""Blocks of a stock recurrent module: one fused call for a unit of several steps.

`torch.lstm` and its kin run a block of the input from a carry, so a block's weight gradients are formed
once, and on a GPU cuDNN runs it as a whole. Dropout between layers is drawn here and not in the fused call:
cuDNN keeps a random state of its own, which cannot be put back, so its masks could not be redrawn.

Rows of different lengths come packed (`torch.nn.utils.rnn.PackedSequence`): the times of a block are one
slice of the packed rows, and the carry of a row that has ended stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch.nn import functional

from .sequence import Cut, Piece, Sequence

__all__ = ["FUSED", "BlockSequence", "Layers", "reversed_rows"]

FUSED: dict[str, Callable[..., Any]] = {
    "LSTM": torch.lstm,
    "GRU": torch.gru,
    "RNN_TANH": torch.rnn_tanh,
    "RNN_RELU": torch.rnn_relu,
}


@dataclass(frozen=True)
class Layers:
    """Layers of one direction: the weights of each fused call, with dropout between the calls."""

    mode: str
    bias: bool
    calls: tuple[list[torch.Tensor], ...]
    dropout: float = 0.0

    def run(
        self, block: torch.Tensor, carry: list[torch.Tensor], sizes: torch.Tensor | None
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The outputs of the last layer, and the carry of all."""
        each = carry[0].shape[0] // len(self.calls)
        after = []
        for number, weights in enumerate(self.calls):
            if number:
                block = functional.dropout(block, self.dropout)
            part = [leaf[number * each : (number + 1) * each] for leaf in carry]
            block, *made = self.fused(block, part, sizes, weights, each)
            after.append(made)
        return block, [torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*after, strict=True)]

    def fused(
        self,
        block: torch.Tensor,
        carry: list[torch.Tensor],
        sizes: torch.Tensor | None,
        weights: list[torch.Tensor],
        layers: int,
    ) -> Any:
        state = carry if self.mode == "LSTM" else carry[0]
        # "train" is what lets cuDNN go backward; without dropout it changes nothing else.
        how = (weights, self.bias, layers, 0.0, True, False)
        if sizes is None:
            return FUSED[self.mode](block, state, *how, False)
        return FUSED[self.mode](block, sizes, state, *how)


@dataclass
class BlockSequence(Sequence):
    """Layers over a number of steps, in blocks; `reverse` goes from the last step to the first.

    With `sizes`, the rows that are there at each step, the input is packed. Packed rows that go from their
    last step to their first are reversed before (`reversed_rows`).
    """

    layers: Layers
    length: int
    chunk: int
    reverse: bool = False
    sizes: torch.Tensor | None = None
    signature: Hashable = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        counts = [1] * self.length if self.sizes is None else self.sizes.tolist()
        self.starts = [0, *accumulate(counts)]
        self.units = -(-self.length // self.chunk)

    def steps(self, unit: int) -> int:
        return min(self.chunk, self.length - unit * self.chunk)

    def place(self, unit: int) -> slice:
        """The rows of a unit, in the input and in the output."""
        begin = unit * self.chunk
        end = begin + self.steps(unit)
        if self.reverse:
            begin, end = self.length - end, self.length - begin
        return slice(self.starts[begin], self.starts[end])

    def cuts(self, unit: int) -> list[Cut]:
        return [Cut(0, self.place(unit))]

    def run(self, unit: int, carry: list[Any], inputs: list[torch.Tensor]) -> tuple[list[Any], list[Piece]]:
        (block,) = inputs
        if self.sizes is not None:
            begin = unit * self.chunk
            output, carry = self.run_packed(block, carry, self.sizes[begin : begin + self.steps(unit)])
        elif self.reverse:
            output, carry = self.layers.run(block.flip(0), carry, None)
            output = output.flip(0)
        else:
            output, carry = self.layers.run(block, carry, None)
        return carry, [Piece(self.place(unit), [output])]

    def in_records(self) -> BlockSequence:
        return self

    def of_one_unit(self) -> BlockSequence:
        return replace(self, length=self.chunk)

    def run_packed(
        self, block: torch.Tensor, carry: list[torch.Tensor], sizes: torch.Tensor
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        rows, active = carry[0].shape[1], int(sizes[0])
        if active == rows:
            return self.layers.run(block, carry, sizes)
        output, after = self.layers.run(block, [leaf[:, :active].contiguous() for leaf in carry], sizes)
        ended = [leaf[:, active:] for leaf in carry]
        return output, [torch.cat(parts, 1) for parts in zip(after, ended, strict=True)]


def reversed_rows(sizes: torch.Tensor) -> torch.Tensor:
    """Where each packed row goes when every sequence is reversed; the same places lead back.

    >>> reversed_rows(torch.tensor([2, 2, 1])).tolist()
    [4, 3, 2, 1, 0]
    """
    starts = sizes.cumsum(0) - sizes
    times = torch.arange(len(sizes)).repeat_interleave(sizes)
    rows = torch.arange(int(sizes.sum())) - starts[times]
    lengths = torch.bincount(rows)
    return starts[lengths[rows] - 1 - times] + rows
