"""Sequences of many equal steps: binomial checkpointing, in any memory.

Problem: an unrolled recurrent network, or any stack of about equal blocks, under a budget that asks for far
more than one recomputation.

Method: binomial checkpointing (Griewank 1992, *treeverse*; Griewank and Walther 2000, *revolve*; see
`table`), as Gruslys, Munos, Danihelka, Lanctot, Graves, "Memory-Efficient Backpropagation Through Time"
(2016), have it for networks. `table` counts forward runs (`forward_count`), `actions` makes and checks the
best actions for t equal steps and m slots (`schedule`, `replay`), `steps` cuts a graph into about equal
steps, in several ways. Here, for each way, the largest number of slots that fits is found by bisection on the
simulator, as more slots never take more runs. The fastest schedule of all wins, or the one with the smallest
peak when none fits.

What is stored needs no actions of its own here: a state that is read before it is next written waits
in memory, so the order of runs says it all (see `order`). For n equal ops whose backward reads the input, m
slots of "hidden" give the optimum: `forward_count(n, m)` less n - 1 forward runs, as no step runs once more
just before its backward.

Complexity: O(counts · log slots) simulations. Orders of more than a quarter of a million runs are not
tried.

Limits: states of about equal size. What crosses many steps (stacked outputs, skips) is not in the model; it
only shows in the simulated peak.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ...plans.graph import Graph
from ...plans.keep_all import keep_all
from ...plans.order import first_order, with_drops
from ...plans.schedule import Schedule
from ...plans.simulator import simulate
from ..chain_stages import find_stages
from .steps import Order, all_steps
from .table import Keep, read_problem

__all__ = ["sequence", "sequence_orders", "smallest_orders"]

FINEST_RUNS, OTHER_RUNS = 400_000, 400_000
"""The runs of all orders offered for no budget: of the finest cut with "hidden", and of the others."""


def sequence(graph: Graph, budget: int, *, keep: Keep = "hidden") -> Schedule:
    """The fastest schedule found under the budget, or the one with the smallest peak when none fits.

    `keep` says what a slot holds: "hidden" (what crosses a cut), "internal" (all that the backward of a step
    reads) or "mixed" (either, whichever takes fewer runs).
    """
    read_problem(0, 1, keep=keep)
    whole = keep_all(graph)
    if simulate(graph, whole).peak <= budget:
        return whole
    search = _Search(graph, keep)
    search.look(budget)
    reached = max(budget, search.least.peak)
    if reached > budget:
        search.look(reached)  # the fastest that is as small as the smallest
    return with_drops(graph, *search.best(reached).order)


def sequence_orders(graph: Graph) -> Iterator[Order]:
    """Orders of runs for several numbers of steps, slots and all strategies; the first keeps everything.

    The finest cut comes with every number of slots where the graph is small enough, else with several.
    """
    yield first_order(graph)
    fine = find_stages(graph)
    if len(fine) < 2:
        return
    finest, *coarser = all_steps(fine, "hidden")
    yield from finest.orders(FINEST_RUNS)
    others = [*coarser, *all_steps(fine, "internal"), *all_steps(fine, "mixed")]
    every = 1 + len(others) * 8 * len(graph.ops) // OTHER_RUNS
    for part in others[::every]:
        yield from part.orders(every * OTHER_RUNS // len(others))


def smallest_orders(graph: Graph) -> Iterator[Order]:
    """Orders of runs with the fewest slots, and twice as many, for several cuts: small and slow."""
    fine = find_stages(graph)
    for part in all_steps(fine, "hidden") if len(fine) > 1 else ():
        for slots in {part.least_slots, min(2 * part.least_slots, part.most_slots)}:
            yield part.order(slots)


@dataclass(frozen=True)
class _Found:
    peak: int
    seconds: float
    order: Order


class _Search:
    """Every order judged so far, by its cut and its number of slots."""

    def __init__(self, graph: Graph, keep: Keep) -> None:
        self.graph = graph
        self.parts = all_steps(find_stages(graph), keep)
        self.found: dict[tuple[int, int], _Found] = {(-1, 0): self.judge(first_order(graph))}

    @property
    def least(self) -> _Found:
        return min(self.found.values(), key=lambda found: (found.peak, found.seconds))

    def best(self, budget: int) -> _Found:
        fitting = [found for found in self.found.values() if found.peak <= budget]
        return min(fitting, key=lambda found: (found.seconds, found.peak))

    def judge(self, order: Order) -> _Found:
        timeline = simulate(self.graph, with_drops(self.graph, *order))
        return _Found(timeline.peak, timeline.seconds, order)

    def look(self, budget: int) -> None:
        """Bisect the slots of each cut for the most that fit, and so for the fewest runs."""
        fastest = min((f.seconds for f in self.found.values() if f.peak <= budget), default=float("inf"))
        for index, part in enumerate(self.parts):
            low, high = part.least_slots - 1, part.most_slots + 1
            while high - low > 1:
                middle = (low + high) // 2 if high <= part.most_slots else part.most_slots
                found = self.found.get((index, middle))
                if found is None:
                    order = part.order(middle)
                    if self.seconds(order) >= fastest:
                        low = middle  # with fewer slots it would be slower still
                        continue
                    found = self.found[index, middle] = self.judge(order)
                if found.peak <= budget:
                    low, fastest = middle, min(fastest, found.seconds)
                else:
                    high = middle

    def seconds(self, order: Order) -> float:
        return sum(self.graph.op[name].seconds for names in order for name in names)
