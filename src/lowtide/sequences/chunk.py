"""Several steps of a scan with fixed places in memory for all that goes in and out of them.

So they can be captured as graphs of kernels: `advance` runs the steps, `go_back` runs them recorded and goes
backward through them. For a cell both do step by step what the loop over single steps does, in the same
order; for a stock module the steps are one block.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Several
from contextlib import AbstractContextManager
from typing import Any

import torch

from ..torch_state.autocast_state import State
from .closed import Closed, graph_number
from .outputs import Last, Outputs, Stacked, Summed
from .record import Flows, Gradients, Record
from .sequence import Place, Sequence

__all__ = ["Chunk"]


class Chunk:
    """The places of a chunk: its carry, its part of xs, its outputs, and the gradients of all these."""

    def __init__(
        self,
        sequence: Sequence,
        carry: Several[torch.Tensor],
        xs: Several[torch.Tensor],
        wanted: Several[bool],
        closed: Closed,
        outputs: Outputs,
        sample: Several[torch.Tensor],
    ) -> None:
        """`sample` are outputs of an inner unit; only their shape and kind are read."""
        self.sequence, self.closed, self.wanted = sequence, closed, list(wanted)
        steps = sequence.chunk
        self.inner = sequence.of_one_unit()
        self.carry = [torch.empty_like(leaf) for leaf in carry]
        self.inputs = [leaf.new_empty((steps, *leaf.shape[1:])) for leaf in xs]
        self.outputs, self.sample = _outputs_of(outputs, steps, sample), sample
        self.reached_start: list[bool] = []
        self.flows: Flows | None = None
        self.autocast: State = ()  # that of the user's backward

    def place(self, unit: int) -> slice:
        """The places in time of a unit of this many steps."""
        steps, length = self.sequence.chunk, self.sequence.length
        start = length - (unit + 1) * steps if self.sequence.reverse else unit * steps
        return slice(start, start + steps)

    def take_sample(self) -> Several[torch.Tensor]:
        """Outputs as an inner unit gives them; they are not held here any longer."""
        sample, self.sample = self.sample, []
        return sample

    def read(self, unit: int, xs: Iterable[torch.Tensor]) -> None:
        """Let the steps be those of a unit."""
        for mine, leaf in zip(self.inputs, xs, strict=True):
            mine.copy_(leaf[self.place(unit)])

    def start_from(self, carry: Iterable[torch.Tensor]) -> None:
        """Let the steps start from a carry."""
        for mine, leaf in zip(self.carry, carry, strict=True):
            if mine is not leaf:
                mine.copy_(leaf)

    def advance(self) -> None:
        """Run the steps; their carry takes the place of the one before."""
        closed = self.closed
        carry: list[Any] = list(self.carry)
        for unit in range(self.inner.units):
            record = self.record(unit, carry, closed.minding() if unit == 1 else closed.standing_in())
            carry = record.next_carry
            for piece in record.take_outputs():
                if self.outputs is not None:
                    self.outputs.write(piece)
            self.flows = record.flows
        self.start_from(carry)

    def try_forward(self) -> None:
        """Run the first of the inner units and leave no trace but a random state."""
        self.record(0, list(self.carry), self.closed.standing_in())

    def try_backward(self) -> None:
        """Run the first of the inner units and go back through it; leaves no trace but a random state."""
        closed = self.closed.with_leaves_of_its_own()
        record = self.recorded(0, list(self.carry), closed)
        given = [self.gradients_at(place) for place in record.places]
        read = [closed.stand_ins[place] for place in closed.places]
        record.backward(self.gradients, given, read, self.autocast)

    def record(self, unit: int, carry: list[Any], reading: AbstractContextManager[Any]) -> Record:
        with reading:
            return Record(self.inner, unit, carry, self.inputs, self.wanted)

    def prepare_to_go_back(self, outputs: Outputs, totals: Gradients) -> None:
        """Make places for gradients: those of the outputs are made of `totals`."""
        self.totals, self.shared = totals, not isinstance(outputs, Stacked)
        steps = self.sequence.chunk
        self.gradients: Gradients = [torch.zeros_like(leaf) for leaf in self.carry]
        self.input_gradients = [
            torch.empty_like(leaf) if on else None for leaf, on in zip(self.inputs, self.wanted, strict=True)
        ]
        self.output_gradients: Gradients = [
            part if part is None or self.shared else part.new_empty((steps, *part.shape[1:]))
            for part in totals
        ]
        if isinstance(outputs, Last):
            self.output_gradients = [None for _ in totals]

    def read_gradients(self, unit: int, carry: Gradients) -> None:
        """Let the gradients be those of a unit."""
        for mine, leaf in zip(self.gradients, carry, strict=True):
            assert mine is not None
            if leaf is None:
                mine.zero_()
            elif mine is not leaf:
                mine.copy_(leaf)
        if not self.shared:
            for mine, leaf in zip(self.output_gradients, self.totals, strict=True):
                if mine is not None and leaf is not None:
                    mine.copy_(leaf[self.place(unit)])

    def go_back(self, closed_totals: Several[Any]) -> None:
        """Run the steps and go backward through them; the gradients take the place of those given.

        Those of closed-over tensors are added to `closed_totals`.
        """
        closed = self.closed.with_leaves_of_its_own()
        carry: list[Any] = list(self.carry)
        records = []
        for unit in range(self.inner.units):
            records.append(self.recorded(unit, carry, closed))
            carry = records[-1].next_carry
        del carry
        gradients = list(self.gradients)
        while records:
            gradients = self.unit_back(records.pop(), gradients, closed, closed_totals)
        for mine, leaf in zip(self.gradients, gradients, strict=True):
            assert mine is not None
            mine.zero_() if leaf is None else mine.copy_(leaf)
        self.reached_start = [leaf is not None for leaf in gradients]

    def recorded(self, unit: int, carry: list[Any], closed: Closed) -> Record:
        """An inner unit that leads back to these leaves and to no others."""
        start = graph_number()
        record = self.record(unit, carry, closed.standing_in())
        record.take_outputs()
        record.keep()
        closed.refuse_others(record.ends, start, [*record.carry, *record.inputs])
        return record

    def unit_back(
        self, record: Record, gradients: Gradients, leaves: Closed, closed_totals: Several[Any]
    ) -> Gradients:
        given = [self.gradients_at(place) for place in record.places]
        places = leaves.places
        read = [leaves.stand_ins[place] for place in places]
        before, inputs, closed = record.backward(gradients, given, read, self.autocast)
        for cut, gradient in zip(record.cuts, inputs, strict=True):
            mine = self.input_gradients[cut.leaf]
            if mine is not None:
                mine[cut.place].zero_() if gradient is None else mine[cut.place].copy_(gradient)
        for place, gradient in zip(places, closed, strict=True):
            _add(closed_totals[place], gradient)
        return before

    def gradients_at(self, place: Place) -> Gradients:
        if self.shared:
            return self.output_gradients
        return [None if part is None else part[place] for part in self.output_gradients]


def _add(total: Any, gradient: torch.Tensor | None) -> None:
    if gradient is not None and total.tensor is None:
        raise RuntimeError("it reads a parameter that it did not read in its first step")
    total.add(gradient)


def _outputs_of(outputs: Outputs, steps: int, sample: Several[torch.Tensor]) -> Outputs | None:
    """Where the outputs of a chunk go: all of them, or the sum so far; the last one is not in a chunk."""
    if isinstance(outputs, Summed):
        mine: Outputs = Summed(steps)
        mine.values = [torch.zeros_like(leaf) for leaf in sample]
        return mine
    if isinstance(outputs, Stacked):
        mine = type(outputs)(steps)
        mine.values = [mine.begin(leaf) for leaf in sample]
        return mine
    return None
