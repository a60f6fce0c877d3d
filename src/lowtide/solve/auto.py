"""What users get: the fastest plan that is found under a budget.

Problem: given a graph and a budget, choose what is recomputed and when, for the least extra time: selective
rematerialisation (selective activation checkpointing), value by value and on any graph.

Method: a *ladder* of undominated plans that does not depend on the budget (see `search` for how it is
found, and `ladder`). `auto` returns the fastest rung that fits. So a larger budget never gives a slower
plan, what a budget of 0 reaches fits every budget above it, and the whole frontier costs no more than one
plan. The ladders of the last few graphs are remembered: asking with another budget takes no time.

Limits: a local search. `bound.lower_bound` proves how far from the optimum it can be at most.
"""

from __future__ import annotations

from collections.abc import Callable

from ..plans.graph import Graph
from ..plans.keep_all import keep_all
from ..plans.schedule import Schedule
from ..plans.simulator import simulate
from .search.ladder import Ladder
from .search.search import Search
from .search.tape import Facts

__all__ = ["auto", "frontier_schedules", "ladder_of", "remembers"]


def auto(graph: Graph, budget: int) -> Schedule:
    """The fastest plan found under the budget, or the one with the smallest peak when none fits."""
    plain = keep_all(graph)
    if simulate(graph, plain).peak <= budget:
        return plain
    ladder = ladder_of(graph)
    rung = ladder.best(budget) or ladder[0]
    return Facts(graph).schedule(rung.order.tolist())


def frontier_schedules(graph: Graph, progress: Callable[[float], None] | None = None) -> list[Schedule]:
    """The undominated schedules of a graph, from the smallest peak to keeping everything."""
    facts = Facts(graph)
    return [facts.schedule(rung.order.tolist()) for rung in ladder_of(graph, progress)]


_remembered: dict[Graph, Ladder] = {}
_MOST_REMEMBERED = 4


def remembers(graph: Graph) -> bool:
    """Whether the ladder of a graph is at hand."""
    return graph in _remembered


def ladder_of(graph: Graph, progress: Callable[[float], None] | None = None) -> Ladder:
    """The ladder of a graph, searched for unless it is remembered."""
    ladder = _remembered.pop(graph, None) or Search(graph, progress).run()
    _remembered[graph] = ladder
    while len(_remembered) > _MOST_REMEMBERED:
        del _remembered[next(iter(_remembered))]
    return ladder
