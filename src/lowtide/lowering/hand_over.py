"""When each awaited gradient leaves the backward: complete, and its parameter read for the last time.

Whoever gets it may write to the parameter (an optimizer that steps inside the backward does), and a later op
may read that parameter, perhaps to recompute something. A gradient for which the graph has an op of its own
is gone afterwards, and leaves where that op stands: DDP, which takes those, writes to no parameter.

Gradients leave in groups, since each departure takes autograd some time: those that stay in `.grad` wait for
each other until they are a share of all; others leave at once, for the plan counts on their bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import fx

from ..capture.lift import Lifted
from ..capture.rewrites.handing import is_handing
from ..capture.trace import Trace
from ..plans.schedule import Drop, Run

__all__ = ["Groups", "Handing"]

Groups = tuple[tuple[int, ...], ...]

_DEPARTURES = 32
"""Into how many groups the bytes of gradients that stay are divided; chosen: DDP's buckets are fewer."""


class Handing:
    """The departures of a backward's gradients: after which steps, in which groups."""

    def __init__(self, trace: Trace, lifted: Lifted, steps: Sequence[Run | Drop]) -> None:
        self.trace = trace
        self.lifted = lifted
        self.groups: list[tuple[int, ...]] = []
        self.waiting: list[int] = []
        self.leaving = self.departures(steps) if trace.awaited else {}
        self.last = max(self.leaving, default=-1)
        stay = [place for places in self.leaving.values() for place in places if not self.is_gone(place)]
        self.enough = sum(map(self.bytes, stay)) / _DEPARTURES

    def departures(self, steps: Sequence[Run | Drop]) -> dict[int, list[int]]:
        """The places whose gradient may leave after a step, by the number of that step."""
        made: dict[str, int] = {}
        read: dict[str, int] = {}
        runs: dict[str, int] = {}
        for index, step in enumerate(steps):
            if isinstance(step, Run):
                op = self.lifted.graph.op[step.op]
                runs[step.op] = index
                made.update(dict.fromkeys(op.writes, index))
                read.update(dict.fromkeys(op.reads, index))
        found: dict[int, list[int]] = {}
        for place in sorted(self.trace.awaited):
            gradient = self.trace.gradients[place]
            if is_handing(gradient):
                found.setdefault(runs[gradient.name], []).append(place)
            elif (
                value := self.value(gradient)
            ) in made:  # else it comes from elsewhere, and leaves at the end
                parameter = self.value(self.trace.primals[place])
                complete = made[self.lifted.written.get(value, value)]
                found.setdefault(max(complete, read.get(parameter, -1)), []).append(place)
        return found

    def due(self, index: int) -> Iterator[tuple[tuple[int, ...], list[fx.Node]]]:
        """The group that leaves after a step, if one does: its places and its gradients."""
        leaving = self.leaving.get(index, [])
        self.waiting += leaving
        ends = index == self.last or any(map(self.is_gone, leaving))
        if self.waiting and (ends or sum(map(self.bytes, self.waiting)) >= self.enough):
            places, self.waiting = tuple(self.waiting), []
            self.groups.append(places)
            yield places, [self.gradient(place) for place in places]

    def left(self, gradients: Sequence[Any]) -> list[Any]:
        """The gradients that are returned when the backward is over; None in the place of the others."""
        handed = {place for group in self.groups for place in group}
        return [None if place in handed else gradient for place, gradient in enumerate(gradients)]

    def is_gone(self, place: int) -> bool:
        return is_handing(self.trace.gradients[place])

    def gradient(self, place: int) -> fx.Node:
        found: fx.Node = self.trace.gradients[place]
        return found.args[1][0] if is_handing(found) else found  # type: ignore[index,return-value]

    def value(self, node: Any) -> str:
        return self.lifted.value_of.get(node, "") if isinstance(node, fx.Node) else ""

    def bytes(self, place: int) -> int:
        return self.lifted.graph.value[self.value(self.gradient(place))].bytes
