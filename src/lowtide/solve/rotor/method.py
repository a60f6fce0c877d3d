"""Blocks under a budget: recomputation at many levels, planned by a dynamic programme over the whole graph.

Problem: the fastest schedule of a captured graph under a budget, where blocks may keep all, some or none of
what their backward reads, and may be recomputed several times.

Method: the graph becomes a chain of blocks with several ways to keep each (see `blocks`), at two or
three resolutions: a few large blocks with many ways, which is best for mild budgets, and many small ones with
a few ways, which go lower. One table of the dynamic programme (see `table`) answers all budgets. The model's
bytes are near the truth but not the truth, so plans for neighbouring memories are turned into orders of runs
and judged by the simulator: bisection finds the largest memory whose plan fits, and its neighbours are looked
at too.

Complexity: the tables take about a second for 1000 ops and are remembered for the last few graphs; a
budget then takes some twenty simulations.

Limits: what leaves a block is kept until its backward unless the whole block is recomputed. First runs stay
in program order. Graphs with few cheap cuts have few good blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from ...plans.graph import Graph
from ...plans.keep_all import keep_all
from ...plans.order import first_order, with_drops
from ...plans.schedule import Schedule
from ...plans.simulator import Timeline, simulate
from ..best import rank
from ..chain_stages import stages_at
from .blocks import Blocks, choose_cuts
from .table import ChainTable

__all__ = ["rotor", "rotor_orders", "rotor_orders_at"]

Orders = tuple[list[str], list[str]]


@dataclass(frozen=True)
class Resolution:
    """How to look at a graph: the most stages, how many of them make a block, and the ways for each block.

    `orders` is how many plans to offer as candidates, `units` that of the table.
    """

    stages: int
    widths: tuple[int, ...]
    ways: int
    orders: int
    units: int = 500


RESOLUTIONS = (
    (
        2000,
        (
            Resolution(4, (1, 2, 3, 4), 30, 6, 1000),
            Resolution(12, (1, 2, 3, 5, 8), 10, 8),
            Resolution(48, (1, 2, 3, 5, 8), 8, 12),
        ),
    ),
    (5000, (Resolution(8, (1, 2, 4, 8), 10, 8), Resolution(48, (1, 2, 3, 5), 6, 14))),
)
"""The resolutions for graphs of up to that number of ops."""

COARSE = (Resolution(4, (1, 2, 4), 8, 4, 1000), Resolution(48, (1, 2, 4), 4, 10))

NEAR = (-2, -1, 1, 2, 3, 4)
"""The neighbours of the largest fitting memory, in units, that are looked at too."""


def rotor(graph: Graph, budget: int) -> Schedule:
    """The fastest plan found under the budget, or the one with the smallest peak when none fits."""
    best = keep_all(graph)
    top = simulate(graph, best)
    if top.peak <= budget:
        return best
    judged = [(top, best)]
    for model in _models(graph):
        judged += _judge(model, budget)
    return min(judged, key=lambda pair: rank(pair[0], budget))[1]


def rotor_orders(graph: Graph, *, density: int = 1) -> Iterator[Orders]:
    """Different orders of runs from keeping everything to the smallest memory, whatever the budget.

    Their number grows with the density.
    """
    first = first_order(graph)
    yield first
    seen = {tuple(first[1])}
    for model in _models(graph):
        for row in model.spread(density):
            order = model.order(row)
            if tuple(order[1]) not in seen:
                seen.add(tuple(order[1]))
                yield order


class _Model:
    """A graph at one resolution: the table of its chain, and plans by row, a row being a number of units."""

    def __init__(self, graph: Graph, resolution: Resolution) -> None:
        self.graph, self.resolution = graph, resolution
        stages = stages_at(graph, choose_cuts(graph, resolution.stages))
        self.blocks = Blocks(stages, widths=resolution.widths, ways=resolution.ways)
        self.table = ChainTable(
            self.blocks.chain, self.blocks.ample, units=resolution.units, shared=self.blocks.shared()
        )
        rows = [memory // self.table.unit for memory, _ in self.table.frontier()]
        self.low, self.high = (rows[0], rows[-1]) if rows else (0, -1)

    def order(self, row: int) -> Orders:
        """The order of runs of the plan for a row from `low` to `high`."""
        plan = self.table.plan(row * self.table.unit)
        return self.blocks.order(plan.actions if plan else ())

    def spread(self, density: int) -> list[int]:
        """Rows from the largest to the smallest, closer together towards the small end."""
        if self.high < self.low:
            return []
        steps, ratio = density * self.resolution.orders - 1, max(self.low, 1) / max(self.high, 1)
        rows = [round(self.high * ratio ** (step / steps)) for step in range(steps)]
        return sorted({*(max(row, self.low) for row in rows), self.low}, reverse=True)


@lru_cache(maxsize=4)
def _models(graph: Graph) -> tuple[_Model, ...]:
    chosen = next((found for ops, found in RESOLUTIONS if len(graph.ops) <= ops), COARSE)
    return tuple(_Model(graph, resolution) for resolution in chosen)


def rotor_orders_at(graph: Graph, fits: Callable[[Orders], bool]) -> None:
    """Ask of the orders around the largest memory whose plan fits whether they do; the asker keeps them."""
    for model in _models(graph):
        _ask_around(model, fits)


def _judge(model: _Model, budget: int) -> list[tuple[Timeline, Schedule]]:
    """The plans of a model around the largest memory whose plan fits, judged."""
    judged: list[tuple[Timeline, Schedule]] = []

    def fits(order: Orders) -> bool:
        schedule = with_drops(model.graph, *order)
        judged.append((simulate(model.graph, schedule), schedule))
        return judged[-1][0].peak <= budget

    _ask_around(model, fits)
    return judged


def _ask_around(model: _Model, fits: Callable[[Orders], bool]) -> None:
    known: dict[int, bool] = {}

    def fit(row: int) -> bool:
        if row not in known:
            known[row] = fits(model.order(row))
        return known[row]

    low, high = model.low, model.high + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fit(middle) else (low, middle)
    for row in (low, *(low + step for step in NEAR)):
        if model.low <= row <= model.high:
            fit(row)
