"""What users get: the fastest plan that is found under a budget.

Problem: given a graph and a budget, choose what is recomputed and when, for the least extra time: selective
rematerialisation (selective activation checkpointing), value by value and on any graph.

Method: a *ladder* of undominated plans that does not depend on the budget (see `search` for how it is
found, and `ladder`). It was searched for at percents of the peak, and a budget lies between them: a few more
descents go to that very budget, and what they find stays on the ladder as a rung. `auto` returns the fastest
rung that fits. So what a budget of 0 reaches fits every budget above it, no plan is slower than one that was
found before for a smaller budget, and the whole frontier costs no more than one plan. The searches of the
last few graphs are remembered: another budget takes a hundredth of the time of the first.

Limits: a local search. `bound.lower_bound` proves how far from the optimum it can be at most. The descents
to a smaller budget may come to a plan that those to a larger one have missed, seldom and by little; the
larger budget has it when it is asked for the next time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..plans.graph import Graph
from ..plans.keep_all import keep_all
from ..plans.schedule import Schedule
from ..plans.simulator import simulate
from .knee import Point, knee
from .search.ladder import Rung
from .search.search import Search

__all__ = ["auto", "frontier_schedules", "knee_rung", "rungs"]


def auto(graph: Graph, budget: int) -> Schedule:
    """The fastest plan found under the budget, or the one with the smallest peak when none fits."""
    plain = keep_all(graph)
    if simulate(graph, plain).peak <= budget:
        return plain
    with _searched(graph) as search:
        return search.facts.schedule(search.at(budget).order.tolist())


def frontier_schedules(graph: Graph, progress: Callable[[float], None] | None = None) -> list[Schedule]:
    """The undominated schedules of a graph, from the smallest peak to keeping everything."""
    with _searched(graph, progress) as search:
        _settle_knee(search)
        return [search.facts.schedule(rung.order.tolist()) for rung in search.ladder]


def rungs(graph: Graph) -> list[Rung]:
    """The plans of a graph that were found so far, by their peaks and seconds."""
    with _searched(graph) as search:
        return list(search.ladder)


def knee_rung(graph: Graph) -> Rung:
    """The plan at the knee."""
    with _searched(graph) as search:
        return _settle_knee(search)


def _settle_knee(search: Search) -> Rung:
    """The rung at the knee, after descents to its peak: whoever asks for that budget moves it no more."""
    whole = Point(search.top, search.graph.seconds)
    while True:
        places = {Point(rung.peak, rung.seconds): rung for rung in search.ladder}
        found = places[knee(places, whole)]
        if search.is_settled(found.peak):
            return found
        search.at(found.peak)


_remembered: dict[Graph, Search] = {}
_MOST_REMEMBERED = 4


@contextmanager
def _searched(graph: Graph, progress: Callable[[float], None] | None = None) -> Iterator[Search]:
    """The search of a graph when its ladder is there: it is run unless it is remembered.

    It is nobody else's meanwhile: another thread that plans the same graph makes its own.
    """
    search = _remembered.pop(graph, None)
    if search is None:
        search = Search(graph, progress)
        search.run()
        search.progress = None
    yield search
    _remembered[graph] = search
    while len(_remembered) > _MOST_REMEMBERED:
        del _remembered[next(iter(_remembered))]
