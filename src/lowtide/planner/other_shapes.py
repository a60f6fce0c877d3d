"""A search that remembers: what was found for one shape of a step is put on the others.

A capped model sees many shapes, and most differ in bytes and seconds alone. The first is searched; on a
later one the plans of the nearest shapes that were searched are judged and fitted to its budget
(`solve.search.carry`), which takes milliseconds. It is searched all the same where nothing fits, or where
much is recomputed and no shape of about its size was searched: near the smallest peak a search finds up to
16 % faster plans.

What is found depends on the shapes that were seen before. So only capped steps search like this, while
`lowtide.plan` gives the same plan every time. No torch.
"""

from __future__ import annotations

from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf, log

from ..errors import OutOfTime, ScheduleError
from ..plans.graph import Graph
from ..plans.keep_all import keep_all
from ..plans.schedule import Schedule
from ..plans.simulator import simulate
from ..solve.auto import ladder_at, recall, remembers
from ..solve.search.carry import Orders, carry
from ..solve.search.coarse import in_units
from ..solve.search.ladder import Ladder, Rung
from ..solve.search.search import by_either
from ..solve.search.tape import Facts
from .kept_ladders import read_ladder, write_ladder

__all__ = ["OtherShapes"]

LITTLE = 0.15
"""The extra time up to which the plans of any other shape will do. Over the steps of GPT-2, Llama, BERT and a
CNN, with batches 12 times shorter to 12 times longer, they were at most 1.9 % slower than what a search
finds, and most of them no slower; above it up to 16 % (benchmarks/other_shapes.py)."""

NEAR = 1.25
"""The ratio of sizes up to which plans will do whatever is recomputed: three searches for an octave. They
were at most 2.7 % slower than what a search finds (the same script)."""

LOOKED_AT, SHAPES, STEPS = 2, 8, 8
"""How many searched shapes are looked at for a new one, are kept for a step, and for how many steps. Chosen,
to bound time and memory: a ladder takes some 100 kB for 200 ops."""


@dataclass(frozen=True)
class Searched:
    """A shape that was searched: the bytes that its schedules can save on, and the orders that were found."""

    size: int
    orders: Orders = field(repr=False)

    def far(self, size: int) -> float:
        """How far a size is from this one, as the logarithm of their ratio."""
        return abs(log(max(size, 1) / max(self.size, 1)))


class OtherShapes:
    """A method for the steps of one caller: `auto`, which remembers what it found for other shapes."""

    def __init__(self) -> None:
        self.known: OrderedDict[str, list[Searched]] = OrderedDict()
        self.searches = 0

    def __call__(self, graph: Graph, budget: int) -> Schedule:
        """A fast schedule under the budget, or the one with the smallest peak that was found."""
        plain = keep_all(graph)
        if simulate(graph, plain).peak <= budget:
            return plain
        carried = None if budget <= 0 or remembers(graph) else self.carried(graph, budget)
        if carried is not None and self.will_do(graph, carried):
            return _schedule(graph, carried)
        ladder = self.searched(graph, budget)
        self.remember(graph, tuple(rung.order for rung in ladder))
        found = ladder.best_or_smallest(budget)
        if carried is not None and (found.peak > budget or carried.seconds < found.seconds):
            found = carried
        return _schedule(graph, found)

    def searched(self, graph: Graph, budget: int) -> Ladder:
        """The plans of a graph: those that are at hand, that an earlier process has left, or of a search."""
        known = remembers(graph)
        kept = None if known else read_ladder(graph, budget)
        if kept is not None and _holds(graph, kept.best_or_smallest(budget)):
            recall(graph, kept)
            return kept
        ladder = ladder_at(graph, budget)
        write_ladder(graph, budget, ladder, anew=not known)
        return ladder

    def carried(self, graph: Graph, budget: int) -> Rung | None:
        """The fastest plan under the budget that comes of those of other shapes."""
        size = _size(graph)
        nearest = sorted(self.known.get(graph.structure, ()), key=lambda each: each.far(size))[:LOOKED_AT]
        orders = [order for each in nearest for order in each.orders]
        if not orders or in_units(graph)[1] > 1:
            return None
        with suppress(OutOfTime):  # the search says so
            return by_either(lambda native: carry(graph, orders, budget, native=native)).best(budget)
        return None

    def will_do(self, graph: Graph, rung: Rung) -> bool:
        """Whether a search could hardly find a plan that is faster by more than a few percent."""
        if rung.seconds <= (1 + LITTLE) * graph.seconds:
            return True
        size = _size(graph)
        far = min((each.far(size) for each in self.known.get(graph.structure, ())), default=inf)
        return far <= log(NEAR)

    def remember(self, graph: Graph, orders: Orders) -> None:
        """Keep what a search found; of the steps and of the shapes of a step the latest stay."""
        size, kept = _size(graph), self.known.pop(graph.structure, [])
        others = [each for each in kept if each.size != size]
        self.known[graph.structure] = [*others, Searched(size, orders)][-SHAPES:]
        while len(self.known) > STEPS:
            self.known.popitem(last=False)
        self.searches += 1


def _size(graph: Graph) -> int:
    return sum(value.bytes for value in graph.values if value.droppable)


def _holds(graph: Graph, rung: Rung) -> bool:
    """Whether a plan from a file does what the file says."""
    try:
        return simulate(graph, _schedule(graph, rung)).peak <= rung.peak
    except ScheduleError:
        return False


def _schedule(graph: Graph, rung: Rung) -> Schedule:
    return Facts(graph).schedule(rung.order.tolist())
