"""A plan with what its schedule does, worked out once for all parts of a report."""

from __future__ import annotations

from functools import cached_property
from itertools import accumulate

from ..plans.planned_step import Plan
from ..plans.schedule import Run
from .decision import Decision, decisions
from .stays import Stay, stays

__all__ = ["Residency", "keeping_everything"]


class Residency:
    """Who is on the device when, what was decided for each value, and what time it is at each step."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.graph = plan.graph
        self.timeline = plan.timeline
        self.steps = plan.schedule.steps

    @cached_property
    def stays(self) -> list[Stay]:
        """All stays of the schedule."""
        return stays(self.graph, self.plan.schedule)

    @cached_property
    def decisions(self) -> dict[str, Decision]:
        """What was decided for each value."""
        return decisions(self.graph, self.plan.schedule)

    @cached_property
    def again(self) -> list[int]:
        """The steps that recompute, in order."""
        seen: set[str] = set()
        repeated = []
        for index, step in enumerate(self.steps):
            if isinstance(step, Run):
                if step.op in seen:
                    repeated.append(index)
                seen.add(step.op)
        return repeated

    @cached_property
    def clock(self) -> list[float]:
        """Seconds up to each step; where no op has a price, every step counts the same."""
        op = self.graph.op
        seconds = [op[step.op].seconds if isinstance(step, Run) else 0.0 for step in self.steps]
        if not any(seconds):
            seconds = [1.0] * len(seconds)
        return list(accumulate(seconds, initial=0.0))


def keeping_everything(plan: Plan) -> Residency:
    """The same for keeping everything on the plan's graph."""
    return Residency(Plan(plan.graph, plan.kept_all, plan.uncapped, "keep_all", plan.budget))
