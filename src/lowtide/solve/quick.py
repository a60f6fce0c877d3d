"""A quick look at what a budget costs: the best of a few greedy descents.

These are descents with which `auto` begins its search (see `search.greedy`), to one budget, or for `smallest`
down to where they end. Their plans are often as good as those of `auto` and take a fraction of its time. They
are there to compare graphs with each other, of which one is then planned in full. `auto` makes the same
descents to a budget that it is asked for, so its plan is at least as good.
"""

from __future__ import annotations

from ..plans.graph import Graph
from .search.ladder import Rung
from .search.search import Search

__all__ = ["quick", "smallest"]


def quick(graph: Graph, budget: int) -> Rung:
    """The fastest of a few plans under the budget, or the one with the smallest peak when none fits."""
    search = Search(graph)
    search.afresh(budget)
    return search.ladder.best(budget) or search.ladder[0]


def smallest(graph: Graph) -> Rung:
    """The plan with the smallest peak of a few."""
    search = Search(graph)
    search.join(search.down(search.bases[0]))
    search.bisect()
    return search.ladder[0]
