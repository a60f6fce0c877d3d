"""The best of several judged candidates: the fastest that fits, or the smallest when none does."""

from __future__ import annotations

from collections.abc import Iterable

from ..plans.graph import Graph
from ..plans.order import with_drops
from ..plans.schedule import Schedule
from ..plans.simulator import Timeline, simulate

__all__ = ["best_schedule", "rank"]


def rank(timeline: Timeline, budget: int) -> tuple[bool, float, float]:
    """Less is better: by seconds under the budget, by peak above it."""
    if timeline.peak <= budget:
        return False, timeline.seconds, timeline.peak
    return True, timeline.peak, timeline.seconds


def best_schedule(graph: Graph, orders: Iterable[tuple[list[str], list[str]]], budget: int) -> Schedule:
    """The schedule of the best of some orders of runs, each judged by the simulator."""
    schedules = (with_drops(graph, *order) for order in orders)
    return min(schedules, key=lambda schedule: rank(simulate(graph, schedule), budget))
