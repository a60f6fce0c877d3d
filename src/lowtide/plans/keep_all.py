"""Keep everything: the vanilla schedule, and the yardstick for all others.

Each op runs once, in program order, and each value is freed after its last use: what eager PyTorch does,
less what autograd holds on to for longer than anything reads it.
"""

from __future__ import annotations

from .graph import Graph
from .order import first_order, with_drops
from .schedule import Schedule

__all__ = ["keep_all"]


def keep_all(graph: Graph, budget: int | None = None) -> Schedule:
    """The schedule that runs each op once; the budget is not looked at."""
    return with_drops(graph, *first_order(graph))
