"""Keep everything: the vanilla schedule, and the yardstick for all others.

Each op runs once, in program order, and each value is freed after its last use: what eager PyTorch does,
less what autograd holds on to for longer than anything reads it. Nothing is written in the place of a value,
unless what runs the step would do so unasked (`Graph.plain_in_place`): the uncapped peak, and "60%" of it,
are those of plain PyTorch, and a step under a budget that it fits anyway runs as it always did.
"""

from __future__ import annotations

from dataclasses import replace

from .graph import Graph
from .order import first_order, with_drops
from .patience import unbounded
from .schedule import Schedule

__all__ = ["keep_all"]


def keep_all(graph: Graph, budget: int | None = None) -> Schedule:
    """The schedule that runs each op once; the budget is not looked at."""
    with unbounded():  # the plan that there always is
        return replace(with_drops(graph, *first_order(graph)), in_place=graph.plain_in_place)
