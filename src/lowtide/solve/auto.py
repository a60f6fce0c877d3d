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
from ..plans.patience import out_of_time, unbounded, until
from ..plans.schedule import Schedule
from ..plans.simulator import simulate
from .search.coarse import in_units
from .search.ladder import Ladder
from .search.search import Search, by_either
from .search.tape import Facts

__all__ = ["auto", "frontier_schedules"]


def auto(graph: Graph, budget: int) -> Schedule:
    """The fastest plan found under the budget, or the one with the smallest peak when none fits."""
    plain = keep_all(graph)
    if simulate(graph, plain).peak <= budget:
        return plain
    searched, unit = in_units(graph)
    ladder = _ladder(searched)
    rung = ladder.best(budget // unit)
    if rung is None and ladder.cut and budget > 0:
        raise out_of_time()
    with unbounded():
        return Facts(graph).schedule((rung or ladder[0]).order.tolist())


def frontier_schedules(graph: Graph, progress: Callable[[float], None] | None = None) -> list[Schedule]:
    """The undominated schedules of a graph, from the smallest peak to keeping everything."""
    facts, ladder = Facts(graph), _ladder(in_units(graph)[0], progress)
    with unbounded():
        return [facts.schedule(rung.order.tolist()) for rung in ladder]


_remembered: dict[Graph, Ladder] = {}
_MOST_REMEMBERED = 4


def _ladder(graph: Graph, progress: Callable[[float], None] | None = None) -> Ladder:
    """The ladder of a graph, searched for unless it is remembered."""
    ladder = _remembered.pop(graph, None)
    if ladder is None or (ladder.cut and until() > ladder.cut):
        ladder = by_either(lambda native: Search(graph, progress, native=native).run())
    _remembered[graph] = ladder
    while len(_remembered) > _MOST_REMEMBERED:
        del _remembered[next(iter(_remembered))]
    return ladder
