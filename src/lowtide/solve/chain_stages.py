"""The forward cut into stages, and the part of the backward that belongs to each: any graph as a chain.

Problem: the methods for chains (`sequence`, `chain`, `rotor`) know stages one after the other, each with a
forward and a backward. A captured joint graph has skips across stages and masks that all layers read.

Method: cut the forward list where the fewest bytes cross: at every place whose crossing bytes are not above
those of its neighbours. A value belongs to the last stage of the forward that uses it, and a run of the
backward to the earliest stage among the values that it reads, never to a later stage than the run before it.
A method for chains then says in which order stages are recomputed (`("forward", i)`) and go backward
(`("backward", i)`), and `order` turns that into runs; recomputations that nothing reads are left out. What
crosses a cut waits because it is read later, so skips and masks need no special care, only bytes.

Complexity: O(ops + reads + writes), and O(runs) for an order.

Limits: one cut position for all values: a graph of two long parallel branches has few good cuts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Literal, TypeAlias

from ..plans.graph import Graph
from ..plans.order import first_order
from .waste import without_waste

__all__ = ["Action", "Stages", "crossing_bytes", "find_stages", "stages_at"]

Action: TypeAlias = tuple[Literal["forward", "backward"], int]


@dataclass(frozen=True)
class Stages:
    """Stages 0 to n-1 of a graph: the forward and the backward ops of each, by name.

    `crossing[i]` is the number of droppable bytes that cross the cut before stage i, `crossing[n]` those
    that the forward leaves behind for nobody: 0.
    """

    graph: Graph
    forward: tuple[tuple[str, ...], ...]
    backward: tuple[tuple[str, ...], ...]
    crossing: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.forward)

    def order(self, actions: Iterable[Action]) -> tuple[list[str], list[str]]:
        """The order of runs in which the backward follows the actions; each stage goes backward once.

        The forward itself is not part of the actions: it runs once in any case.
        """
        first = [name for stage in self.forward for name in stage]
        backward: list[str] = []
        for verb, stage in actions:
            backward += self.recomputable[stage] if verb == "forward" else self.backward[stage]
        return without_waste(self.graph, first, backward)

    @cached_property
    def recomputable(self) -> tuple[tuple[str, ...], ...]:
        """The forward ops of each stage that may be recomputed."""
        op = self.graph.op
        return tuple(tuple(n for n in stage if op[n].kind != "pinned") for stage in self.forward)

    @cached_property
    def forward_seconds(self) -> tuple[float, ...]:
        """The seconds of recomputing each stage."""
        return tuple(sum(self.graph.op[name].seconds for name in stage) for stage in self.recomputable)

    @cached_property
    def backward_seconds(self) -> tuple[float, ...]:
        """The seconds of each stage's backward."""
        return tuple(sum(self.graph.op[name].seconds for name in stage) for stage in self.backward)

    @cached_property
    def saved(self) -> tuple[int, ...]:
        """The bytes that each stage writes and the backward reads: what keeping the whole stage takes."""
        read = {value for stage in self.backward for name in stage for value in self.graph.op[name].reads}
        return tuple(
            self._bytes(v for n in s for v in self.graph.op[n].writes if v in read) for s in self.forward
        )

    @cached_property
    def forward_work(self) -> tuple[int, ...]:
        """The bytes that running each stage takes at most beside what crosses into it."""
        return tuple(self._work(stage, self._leaving(stage)) for stage in self.forward)

    def _bytes(self, names: Iterable[str]) -> int:
        values = (self.graph.value[name] for name in names)
        return sum(value.bytes for value in values if value.droppable)

    def _leaving(self, names: Sequence[str]) -> set[str]:
        """The values written by some ops that others read too."""
        inside = set(names)
        return {
            value
            for name in names
            for value in self.graph.op[name].writes
            if not self._readers.get(value, set()) <= inside
        }

    @cached_property
    def _readers(self) -> dict[str, set[str]]:
        readers: dict[str, set[str]] = {}
        for op in self.graph.ops:
            for value in op.reads:
                readers.setdefault(value, set()).add(op.name)
        return readers

    def _work(self, names: Sequence[str], leaving: set[str]) -> int:
        """The most bytes written by some ops that are there at once, their workspace included."""
        last = {value: name for name in names for value in self.graph.op[name].reads}
        written: set[str] = set()
        now = most = 0
        for name in names:
            op = self.graph.op[name]
            now += sum(self.graph.value[value].bytes for value in op.writes)
            most = max(most, now + op.workspace)
            written.update(op.writes)
            ends = [v for v in op.reads if v in written and last[v] == name and v not in leaving]
            ends += [v for v in op.writes if v not in last and v not in leaving]
            now -= self._bytes(ends)
        return most


def find_stages(graph: Graph, most: int | None = None) -> Stages:
    """Cut a graph into stages, at most `most` of them, where the fewest bytes cross."""
    forward, _ = first_order(graph)
    crossing = crossing_bytes(graph, forward)
    return stages_at(graph, _thin(_low_places(crossing), crossing, most))


def stages_at(graph: Graph, cuts: Iterable[int]) -> Stages:
    """Cut a graph into stages before the given places of its forward list, which are inside it and rising."""
    forward, backward = first_order(graph)
    crossing = crossing_bytes(graph, forward)
    bounds = [0, *cuts, len(forward)]
    stages = tuple(tuple(forward[start:end]) for start, end in pairwise(bounds))
    place = {name: index for index, stage in enumerate(stages) for name in stage}
    split = _split_backward(graph, place, backward, len(stages))
    return Stages(graph, stages, split, tuple(crossing[cut] for cut in bounds))


def crossing_bytes(graph: Graph, forward: Sequence[str]) -> list[int]:
    """The droppable bytes that cross the cut before each forward op: written before, read by it or later."""
    last_read = {value: index for index, name in enumerate(forward) for value in graph.op[name].reads}
    change = [0] * (len(forward) + 1)
    for index, name in enumerate(forward):
        for value in graph.op[name].writes:
            if graph.value[value].droppable and last_read.get(value, index) > index:
                change[index + 1] += graph.value[value].bytes
                change[last_read[value] + 1] -= graph.value[value].bytes
    return list(accumulate(change))


def _low_places(crossing: Sequence[int]) -> list[int]:
    """The cuts whose crossing bytes are not above those of their neighbours."""
    inner = range(1, len(crossing) - 1)
    return [
        i
        for i in inner
        if crossing[i] <= crossing[i - 1] or i == 1
        if crossing[i] <= crossing[i + 1] or i == inner[-1]
    ]


def _thin(places: list[int], crossing: Sequence[int], most: int | None) -> list[int]:
    """At most `most` - 1 of the cuts, evenly spread, each the cheapest of its neighbourhood."""
    if most is None or len(places) < most:
        return places
    # most - 1 cuts make most stages: as many groups of neighbouring places, the cheapest of each.
    bounds = [len(places) * part // (most - 1) for part in range(most)] if most > 1 else [0]
    groups = [places[start:end] for start, end in pairwise(bounds)]
    return [min(group, key=lambda place: (crossing[place], place)) for group in groups if group]


def _split_backward(
    graph: Graph, place: dict[str, int], backward: Sequence[str], count: int
) -> tuple[tuple[str, ...], ...]:
    """The backward list by stages: the program order is kept when the stages go from last to first."""
    used = {
        value: stage
        for name, stage in place.items()
        for value in (*graph.op[name].reads, *graph.op[name].writes)
    }
    stages: list[list[str]] = [[] for _ in range(count)]
    now = count - 1
    for name in backward:
        reads = (value for value in graph.op[name].reads if graph.value[value].droppable)
        # Never later than the run before it: the stages of the backward then follow each other in program
        # order.
        now = min((now, *(used[value] for value in reads if value in used)))
        stages[now].append(name)
    return tuple(map(tuple, stages))
