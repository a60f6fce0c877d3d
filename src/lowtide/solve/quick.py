"""A quick look at what a budget costs: the best of a few greedy descents.

These are descents with which `auto` begins its search (see `search.greedy`), to one budget, or for `smallest`
down to where they end. Their plans are often as good as those of `auto` and take a fraction of its time. They
are there to compare graphs with each other, of which one is then planned in full. `auto` makes the same
descents to a budget that it is asked for, so its plan is at least as good.
"""

from __future__ import annotations

from ..plans.graph import Graph
from .search.coarse import in_bytes, in_units
from .search.ladder import Ladder, Rung
from .search.search import Search, by_either

__all__ = ["quick", "smallest"]


def quick(graph: Graph, budget: int) -> Rung:
    """The fastest of a few plans under the budget, or the one with the smallest peak when none fits."""
    graph, unit = in_units(graph)
    budget //= unit
    ladder = by_either(lambda native: _descents(graph, budget, native))
    return in_bytes(ladder.best(budget) or ladder[0], unit)


def smallest(graph: Graph) -> Rung:
    """The plan with the smallest peak of a few."""
    graph, unit = in_units(graph)
    return in_bytes(by_either(lambda native: _deepest(graph, native))[0], unit)


def _descents(graph: Graph, budget: int, native: bool) -> Ladder:
    search = Search(graph, native=native)
    search.afresh(budget)
    return search.ladder


def _deepest(graph: Graph, native: bool) -> Ladder:
    search = Search(graph, native=native)
    search.join(search.down(search.bases[0]))
    search.bisect()
    return search.ladder
