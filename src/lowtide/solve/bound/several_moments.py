"""A lower bound from several moments of a step together, in whole numbers: closer near the smallest peak.

Problem: one moment sees neither what has to be recomputed before it, nor, with a price per byte, that there
are no parts of values.

Method: the end of the forward and one or two first runs of backward ops in one `programme`, bounded by branch
and cut (`whole_numbers`). The first runs are the one that says most alone, and each of some others beside
it. Of these programmes the one whose bound is the largest after cutting is split.

Complexity: `WORK`, one to five seconds of the CPU for graphs of hundreds to thousands of ops.

Limits: needs `highspy` (`pip install "lowtide[exact]"`), which says where to look; what is proven is proven
in whole numbers. Graphs of up to `MOST_OPS` ops. Where the work runs out the bound is smaller, so it need not
fall when the budget grows by little.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from ...plans.graph import Graph
from .method import CutNetwork, extra_of
from .moments import UNITS, RequiredOps, crowded, first_run
from .programme import of_moments
from .whole_numbers import BranchAndCut

__all__ = ["bound_by_programmes", "least_of"]

WORK = 40_000_000
"""Columns times steps of the simplex method for all programmes. Chosen, for some seconds of the CPU."""

BESIDE = 3
"""First runs that are tried beside the dearest. Chosen: in ViT-B/16 the second is the one that helps."""

MOST_OPS = 5_000


def bound_by_programmes(graph: Graph, budget: int, *, work: int = WORK) -> float:
    """Seconds that no schedule under the budget can beat; infinity when it is proven that none fits."""
    step = RequiredOps(graph)
    if len(step.ops) > MOST_OPS or not _has_highspy():
        return step.once
    found = least_of(step, budget, [*_chosen(step, budget)], work)
    return inf if found is None else step.once * (1 + max(found - sum(step.units), 0) / UNITS)


def _has_highspy() -> bool:
    try:
        import highspy  # noqa: F401
    except ImportError:
        return False
    return True


def least_of(step: RequiredOps, budget: int, choices: list[list[int]], work: int) -> int | None:
    """The units that the step takes at least by programmes of these first runs, or None when nothing fits."""
    closest, programme, fixed = 0, None, 0
    for starts in choices:
        settled = of_moments(step, budget, starts).settled()
        if settled is None:
            return None
        found = BranchAndCut(settled[0], work)
        found.cut()
        if found.bound is None:
            return None
        work = found.work
        if programme is None or found.bound + settled[1] > closest:
            closest, programme, fixed = found.bound + settled[1], found, settled[1]
        if work <= 0:
            break
    if programme is None:
        return 0
    programme.work = work
    programme.split()
    return None if programme.bound is None else programme.bound + fixed


def _chosen(step: RequiredOps, budget: int) -> Iterator[list[int]]:
    """The first run of a backward op that says most alone, then others beside it."""
    backward = [op for op in crowded(step) if step.ops[op].phase == "backward"]
    extra = {op: extra_of(CutNetwork(step, first_run(step, op)), budget, 0) or 0 for op in backward}
    if not extra:
        return
    dearest, *others = sorted(extra, key=lambda op: (-extra[op], op))
    yield [dearest]
    pairs = [sorted((dearest, op)) for op in others]
    beside = [pair for pair in pairs if step.depending_on(pair[0])[pair[1]]]
    yield from beside[:BESIDE]
