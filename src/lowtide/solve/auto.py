"""What users get: the fastest plan that is found under a budget.

Problem: given a graph and a budget, choose what is recomputed and when, for the least extra time: selective
rematerialisation (selective activation checkpointing), value by value and on any graph.

Method: a *ladder* of undominated plans that does not depend on the budget (see `search` for how it is
found, and `ladder`). It was searched for at percents of the peak, and a budget lies between them: a few more
descents go to that very budget, and what they find stays on the ladder as a rung. `auto` returns the fastest
rung that fits. So what a budget of 0 reaches fits every budget above it, no plan is slower than one that was
found before for a smaller budget, and the whole frontier costs no more than one plan. The searches of the
last few graphs are remembered: another budget takes less than a tenth of the time of the first.

Limits: a local search. `bound.lower_bound` proves how far from the optimum it can be at most. The descents
to a smaller budget may come to a plan that those to a larger one have missed, seldom and by little; the
larger budget has it when it is asked for the next time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from ..plans.graph import Graph
from ..plans.keep_all import keep_all
from ..plans.patience import out_of_time, unbounded, until
from ..plans.schedule import Schedule
from ..plans.simulator import simulate
from .knee import Point, knee
from .search.coarse import in_bytes, in_units
from .search.ladder import Ladder, Rung
from .search.search import Search, by_either
from .search.tape import Facts

__all__ = ["at_hand", "auto", "frontier_schedules", "knee_rung", "ladder_at", "recall", "remembers", "rungs"]

Found = TypeVar("Found")


def auto(graph: Graph, budget: int) -> Schedule:
    """The fastest plan found under the budget, or the one with the smallest peak when none fits."""
    plain = keep_all(graph)
    if simulate(graph, plain).peak <= budget:
        return plain
    return _schedules(graph, [ladder_at(graph, budget).best_or_smallest(budget)])[0]


def frontier_schedules(graph: Graph, progress: Callable[[float], None] | None = None) -> list[Schedule]:
    """The undominated schedules of a graph, from the smallest peak to keeping everything."""
    searched, _ = in_units(graph)

    def found(search: Search) -> list[Rung]:
        _settle_knee(search)
        return list(search.ladder)

    return _schedules(graph, _searched(searched, found, progress))


def ladder_at(graph: Graph, budget: int) -> Ladder:
    """The plans of a graph, after descents to a budget."""
    searched, unit = in_units(graph)

    def found(search: Search) -> tuple[list[Rung], float]:
        search.at(budget // unit)
        return list(search.ladder), search.ladder.cut

    rungs, cut = _searched(searched, found)
    if cut and 0 < budget < rungs[0].peak * unit:
        raise out_of_time()
    ladder = Ladder(in_bytes(rung, unit) for rung in rungs)
    ladder.cut = cut
    return ladder


def remembers(graph: Graph) -> bool:
    """Whether the plans of a graph are at hand."""
    return in_units(graph)[0] in _remembered


def rungs(graph: Graph) -> list[Rung]:
    """The plans of a graph that are at hand, by rising peaks."""
    searched, unit = in_units(graph)
    search = _remembered.get(searched)
    if search is None:
        return list(_recalled.get(graph, ()))
    return [in_bytes(rung, unit) for rung in search.ladder]


def at_hand(graph: Graph, budget: int) -> Schedule | None:
    """The fastest plan at hand under a budget, else the smallest; None where there are none."""
    found = Ladder(rungs(graph))
    return _schedules(graph, [found.best_or_smallest(budget)])[0] if len(found) else None


def recall(graph: Graph, ladder: Ladder) -> None:
    """Have the plans of a graph at hand that an earlier search has found; another budget is searched for."""
    _recalled[graph] = ladder
    while len(_recalled) > _MOST_REMEMBERED:
        del _recalled[next(iter(_recalled))]


def knee_rung(graph: Graph) -> Rung:
    """The plan at the knee."""
    searched, unit = in_units(graph)
    return in_bytes(_searched(searched, _settle_knee), unit)


def _schedules(graph: Graph, rungs: Iterable[Rung]) -> list[Schedule]:
    facts = Facts(graph)
    with unbounded():
        return [facts.schedule(rung.order.tolist()) for rung in rungs]


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
_recalled: dict[Graph, Ladder] = {}
_MOST_REMEMBERED = 4


def _searched(
    graph: Graph, use: Callable[[Search], Found], progress: Callable[[float], None] | None = None
) -> Found:
    """What is made of the search of a graph when its ladder is there: it is run unless it is remembered.

    It is nobody else's meanwhile: another thread that plans the same graph makes its own.
    """

    def found(native: bool) -> Found:
        search = _remembered.pop(graph, None)
        if search is None or (search.ladder.cut and until() > search.ladder.cut):
            search = Search(graph, progress, native=native)
            search.run()
            search.progress = None
        search.until = until()
        result = use(search)
        _remembered[graph] = search
        return result

    result = by_either(found)
    while len(_remembered) > _MOST_REMEMBERED:
        del _remembered[next(iter(_remembered))]
    return result
