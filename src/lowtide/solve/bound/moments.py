"""Moments that every schedule of a graph has, and what is certain about them.

A moment is the end of the forward, or the first run of an op. Some ops have certainly run before it, some
certainly run only after it; some bytes are certainly there. `bound` makes its lower bounds from that. All
follows from the simulator's rules, for any order of runs: a pinned forward op that no output needs may for
instance wait for the backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import nlargest
from itertools import pairwise
from math import fsum

from ...plans.graph import Graph, Op
from ...plans.keep_all import keep_all
from ...plans.order import first_order
from ...plans.schedule import Run
from ...plans.simulator import simulate

__all__ = ["Moment", "RequiredOps", "crowded", "end_of_forward", "first_run", "moments"]

MOMENTS = 300
EFFORT = 50_000
"""The most moments besides the fullest, and the most ops in all of them together (but always one moment)."""

FULLEST = 12
"""First runs that are moments in any graph. Chosen: at a quarter of the peak the dearest first run is among
the twelve fullest in all networks of the corpus, and in three of them its stretch has a fuller one."""

UNITS = 1 << 59
"""Running everything once, in the whole numbers that cuts are made of."""


class RequiredOps:
    """The ops that must run, each after those it needs, and what is known of all schedules.

    `early` marks the ops that an output needs: those run in the forward.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.ops = [graph.op[name] for part in first_order(graph) for name in part]
        self.once = fsum(op.seconds for op in self.ops)
        # A hair is taken off, for the quotient of two floats may be rounded up. The quotient comes first: of
        # less than 1e-290 s the units have no float.
        once = self.once or 1.0
        self.units = [int(op.seconds / once * (UNITS * (1 - 1e-15))) for op in self.ops]
        self.writer = {name: index for index, op in enumerate(self.ops) for name in op.writes}
        self.base = graph.fixed_bytes + graph.given_bytes
        self.tangents = {value.name for value in graph.values if value.kind == "tangent"}
        outputs = [self.writer[value.name] for value in graph.values if value.kind == "output"]
        self.early = self.needed_by(outputs)

    def needed_by(self, starts: Iterable[int]) -> bytearray:
        """Marks of the given ops and all they depend on."""
        marks = bytearray(len(self.ops))
        for index in starts:
            marks[index] = 1
        for index in range(len(self.ops) - 1, -1, -1):
            if marks[index]:
                for name in self.ops[index].reads:
                    if name in self.writer:
                        marks[self.writer[name]] = 1
        return marks

    def depending_on(self, start: int) -> bytearray:
        """Marks of all ops that depend on the given one."""
        marks = bytearray(len(self.ops))
        fresh = set(self.ops[start].writes)
        for index in range(start + 1, len(self.ops)):
            if not fresh.isdisjoint(self.ops[index].reads):
                marks[index] = 1
                fresh.update(self.ops[index].writes)
        return marks

    def held_bytes(self, op: Op) -> int:
        """Bytes that an op writes and that stay until the end."""
        values = (self.graph.value[name] for name in op.writes)
        return sum(value.bytes for value in values if not value.droppable)

    def least_bytes(self) -> int:
        """Bytes that every schedule needs at some time: all held values at the end, or one op and its own."""
        value = self.graph.value
        # At the end all held values are there.
        least = self.base + sum(map(self.held_bytes, self.ops))
        outputs = self.base + sum(self.held_bytes(op) for i, op in enumerate(self.ops) if self.early[i])
        for op in self.ops:
            start = outputs if op.phase == "backward" else self.base
            # Where it may write in the place of a read, its writes may take no bytes of their own.
            names = op.reads if op.takes else (*op.reads, *op.writes)
            size = start + op.workspace + sum(value[name].bytes for name in names if value[name].droppable)
            least = max(least, size)
        return least


@dataclass(frozen=True)
class Moment:
    """A moment that every schedule has.

    `before` and `after` mark the ops that have certainly run and that have certainly not run yet; `there` are
    droppable values that are there in any case, `size` is the bytes of those and of all that no op writes.
    `settled` are tangents that are counted already or that do not exist yet.
    """

    before: bytearray
    after: bytearray
    there: frozenset[str]
    size: int
    settled: frozenset[str]


def moments(step: RequiredOps) -> Iterator[Moment]:
    """The end of the forward, then first runs at which keeping everything holds much."""
    yield end_of_forward(step)
    for index in crowded(step):
        yield first_run(step, index)


def crowded(step: RequiredOps) -> list[int]:
    """Numbers of ops at which the most bytes are resident: the fullest of all, and one of each stretch."""
    count = min(MOMENTS, EFFORT // max(len(step.ops), 1)) - 1
    schedule = keep_all(step.graph)
    resident = simulate(step.graph, schedule).resident
    number = {
        op.name: index for index, op in enumerate(step.ops) if step.early[index] or op.phase == "backward"
    }
    runs = [
        (size, number[run.op])
        for size, run in zip(resident, schedule.steps, strict=True)
        if isinstance(run, Run) and run.op in number
    ]
    if count <= 0:
        return []
    fullest = nlargest(FULLEST, runs)
    # Spread over the step: the others next to each other bound about the same.
    edges = [round(part * len(runs) / count) for part in range(count + 1)]
    stretches = [max(runs[start:end]) for start, end in pairwise(edges) if start < end]
    return list(dict.fromkeys(index for _, index in (*fullest, *stretches)))


def end_of_forward(step: RequiredOps) -> Moment:
    """The moment between the forward and the backward."""
    tangents = sum(value.bytes for value in step.graph.values if value.kind == "tangent")
    return Moment(
        before=step.early,
        after=bytearray(op.phase == "backward" for op in step.ops),
        there=frozenset(),
        size=step.base + step.graph.boundary + tangents,
        settled=frozenset(step.tangents),
    )


def first_run(step: RequiredOps, index: int) -> Moment:
    """The first run of a backward op, or of a forward op that an output needs."""
    op, value = step.ops[index], step.graph.value
    backward = op.phase == "backward"
    before, after = step.needed_by([index]), step.depending_on(index)
    if backward:
        before = bytearray(map(max, before, step.early))
    else:
        after = bytearray(
            later or other.phase == "backward" for later, other in zip(after, step.ops, strict=True)
        )
    # One value alone that the op takes counts only if it is read later: what is written takes its place.
    gone = op.takes if len(op.takes) == 1 else ()
    names = (name for name in (*op.reads, *op.writes) if name not in gone)
    there = frozenset(name for name in names if value[name].droppable)
    held = {name for name in step.tangents if not value[name].droppable} if backward else set()
    size = step.base + op.workspace + sum(value[name].bytes for name in there | held)
    if len(op.takes) > 1:
        size -= value[op.takes[0]].bytes
    settled = step.tangents & (there | held) if backward else step.tangents
    return Moment(before, after, there, size, frozenset(settled))
