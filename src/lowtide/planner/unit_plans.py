"""The plans that a unit of a larger step may follow: undominated in bytes saved, peak and seconds.

A unit alone trades its peak for time. In a step of many units what it holds until its backward counts as
much: all that come after it run beside that. The search knows one budget; a graph whose caller holds b bytes
more between forward and backward (`Graph.boundary`) is one where, under a budget c, no more than c - b may be
saved. So the frontiers of the graph with no, with some and with much at its boundary hold the plans wanted.
Each is judged again on the graph as it is. No torch.
"""

from __future__ import annotations

from functools import lru_cache

from ..plans.graph import Graph
from ..plans.planned_step import Plan, make_plan
from .frontiers import frontier
from .under_budget import with_allocator_overhead
from .unit_split import Choice, undominated

__all__ = ["choice_of", "saved_by", "unit_plans"]

_HELD = (0, 1, 2)
"""Halves of the uncapped peak at the boundary; chosen: more of them add few plans to those of blocks."""


@lru_cache(maxsize=32)
def unit_plans(graph: Graph, blocks: tuple[int, ...] | None = None) -> tuple[Plan, ...]:
    """The plans of a unit, the one that keeps everything first; `blocks` are those of a caching allocator."""
    bare = graph.replace(boundary=0, fixed={})
    whole = frontier(bare)
    plans = [make_plan(bare, whole[0].kept_all, method="keep_all"), *whole]
    for halves in _HELD[1:]:
        held = frontier(bare.replace(boundary=halves * whole.vanilla // 2))
        plans += [make_plan(bare, plan.schedule, method=plan.method) for plan in held]
    plans = [with_allocator_overhead(plan, blocks) for plan in plans]
    others = undominated(map(choice_of, plans[1:]))
    return plans[0], *(plans[place + 1] for place in others)


def choice_of(plan: Plan) -> Choice:
    """What counts of a plan where a budget is split."""
    return Choice(saved_by(plan), plan.peak, plan.seconds)


def saved_by(plan: Plan) -> int:
    """The bytes that a plan holds until its backward besides inputs and outputs, which its caller counts."""
    outputs = sum(value.bytes for value in plan.graph.values if value.kind == "output")
    return max(plan.saved - outputs, 0)
