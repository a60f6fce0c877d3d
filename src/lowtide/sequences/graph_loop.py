"""The executor of scans on a GPU: chunks of steps, each launched as one graph of kernels.

Problem: a small cell's kernels are over before the next ones are launched, so a step takes as long as
launching it, and recomputing steps costs accordingly.

Method: the actions are those of `loop`, and so are the operations of every step and their order. But a unit
has fixed places in memory (`chunk`), so it can be captured once for a scan and replayed for each unit:
one graph runs its steps, one runs them and goes back through them. Kept carries are copies. A unit unlike the
others (the last one, if it is shorter or its output alone counts) runs as in `loop`, step by step as in a
graph; so do all where they cannot be captured.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ..console.log import say_once
from .chunk import Chunk
from .kernel_graph import Replay, captured, warm
from .loop import Kept, Loop
from .outputs import Last, Stacked, Summed
from .record import Gradients, Record

__all__ = ["GraphLoop"]


class GraphLoop(Loop):
    """One scan on its way forward and back, in graphs.

    The actions are those of chunks; its `sequence` has the steps of a chunk one by one.
    """

    def __init__(self, *args: Any, chunk: Chunk, **options: Any) -> None:
        super().__init__(*args, **options)
        self.chunk = chunk
        self.recorded_steps: list[Record] = []
        self.device = chunk.carry[0].device
        self.works = True
        self.goes_back = False
        self.start_of_last: Kept | None = None
        self.replay_advance: Replay | None = None
        self.replay_back: Replay | None = None

    def runs_as_graph(self, unit: int) -> bool:
        """Whether a unit runs as a graph."""
        chunks = self.chunk.sequence
        last, short = unit == chunks.units - 1, chunks.steps(unit) < chunks.chunk
        return self.works and not (last and (short or isinstance(self.outputs, Last)))

    def steps_of(self, unit: int) -> range:
        """What a unit is in the loop's own sequence."""
        several = self.chunk.inner.units
        return range(unit * several, min((unit + 1) * several, self.sequence.units))

    def forward(self, init: list[Any]) -> tuple[list[Any], list[Any]]:
        self.chunk.start_from(init)
        if self.chunk.outputs is not None:
            self.outputs.values = [self.outputs.begin(leaf) for leaf in self.chunk.take_sample()]
        self.replay_advance = self.capture(self.chunk.advance, self.chunk.try_forward)
        return super().forward(init)

    def run_all(self) -> None:
        super().run_all()
        if not self.works:
            return
        if self.start_of_last is not None:
            self.carry = self.carry_to_keep()
            self.chunk.start_from(self.start_of_last.carry)
        if isinstance(self.outputs, Summed):
            self.take_sums()

    def take_sums(self) -> None:
        """The outputs summed up in the chunk, with what a shorter unit has added."""
        assert self.chunk.outputs is not None
        sums = [leaf.clone() for leaf in self.chunk.outputs.values]
        rest = self.outputs.values
        self.outputs.values = [a if b is None else a.add_(b) for a, b in zip(sums, rest, strict=True)]

    def backward(self, carry: Gradients, totals: Gradients) -> tuple[Gradients, Gradients, Gradients]:
        self.goes_back = True
        starts, xs, closed = super().backward(carry, totals)
        if self.replay_back is not None:
            # A graph has a place, and so zeros, for every gradient; plain autograd gives None where none
            # flows.
            flows = self.chunk.reached_start
            starts = [leaf if on else None for leaf, on in zip(starts, flows, strict=True)]
        return starts, xs, closed

    def note_looked_at(self) -> None:
        if not self.works:
            super().note_looked_at()

    def run(self, unit: int, *, keep: bool) -> None:
        if not self.runs_as_graph(unit):
            self.run_plainly(unit, keep=keep)
            return
        if keep and self.goes_back:  # going back runs it
            return
        if keep:
            self.start_of_last = self.kept.get(unit) or Kept(self.carry_to_keep(), self.random_state())
        self.chunk.read(unit, self.xs)
        assert self.replay_advance is not None
        self.replay_advance()
        if self.steps_of(unit).stop > self.reached:
            self.note_outputs(unit)

    def run_plainly(self, unit: int, *, keep: bool) -> None:
        """As in `loop`, its steps recorded one by one."""
        self.carry, self.recorded_steps = self.carry_to_keep(), []
        for step in self.steps_of(unit):
            super().run(step, keep=keep)
            if self.workspace is not None:
                self.recorded_steps.append(self.workspace)
        self.workspace = None

    def note_outputs(self, unit: int) -> None:
        self.reached = self.steps_of(unit).stop
        assert self.chunk.flows is not None
        self.flows = self.flows.then(self.chunk.flows)
        if isinstance(self.outputs, Stacked):
            assert self.chunk.outputs is not None
            for whole, part in zip(self.outputs.values, self.chunk.outputs.values, strict=True):
                whole[self.chunk.place(unit)].copy_(part)

    def carry_to_keep(self) -> list[Any]:
        return [leaf.clone() for leaf in self.chunk.carry] if self.works else self.carry

    def load(self, state: int) -> None:
        super().load(state)
        if self.works:
            self.chunk.start_from(self.carry)

    def go_back(self, unit: int) -> None:
        if self.runs_as_graph(unit) and self.replay_back is None:
            self.prepare_to_go_back(unit)
        if not self.runs_as_graph(unit):
            self.go_back_plainly(unit)
            return
        if self.start_of_last is not None:
            self.return_to_start_of_last()
        self.chunk.read(unit, self.xs)
        self.chunk.read_gradients(unit, self.carry_gradients)
        assert self.replay_back is not None
        self.replay_back()
        self.carry_gradients = list(self.chunk.gradients)
        for total, part in zip(self.xs_totals, self.chunk.input_gradients, strict=True):
            total.add(part, self.chunk.place(unit))

    def prepare_to_go_back(self, unit: int) -> None:
        self.chunk.read(unit, self.xs)
        self.chunk.prepare_to_go_back(self.outputs, self.totals)
        self.chunk.read_gradients(unit, self.carry_gradients)
        self.chunk.autocast = self.surroundings.outside
        body = partial(self.chunk.go_back, self.closed_totals)
        self.replay_back = self.capture(body, self.chunk.try_backward)

    def go_back_plainly(self, unit: int) -> None:
        """As in `loop`; a unit that was to go back as a graph has not been recorded."""
        if not self.recorded_steps:
            if self.start_of_last is not None:
                self.return_to_start_of_last()
            self.run_plainly(unit, keep=True)
        for step in reversed(self.steps_of(unit)):
            self.workspace = self.recorded_steps.pop()
            super().go_back(step)

    def return_to_start_of_last(self) -> None:
        assert self.start_of_last is not None
        carry, random = self.start_of_last
        self.start_of_last, self.carry = None, carry
        self.chunk.start_from(carry)
        if random is not None:
            self.surroundings.go_on_from(random)

    def capture(self, body: Callable[[], None], one_step: Callable[[], None]) -> Replay | None:
        """A graph of what a function launches; None where that cannot be, and the loop goes on without."""
        present = self.surroundings.look()
        try:
            # Libraries allocate and initialise in their first calls, which a capture does not allow.
            warm(one_step, self.device)
            return captured(body, self.device)
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            say_once(f"a scan cannot be captured as CUDA graphs, so its units run one by one: {reason}")
            # `carry_to_keep` first: while `works` holds, the carry is in the chunk's places.
            self.carry, self.works = self.carry_to_keep(), False
            if self.known is not None:
                self.known.not_captured = reason
            return None
        finally:
            self.surroundings.go_on_from(present)
