"""What follows where a caller holds less, or more, of what a step returned than its plan counts on.

Where everything is kept, a caller who lets go changes the prediction alone, and the functions of the step
stay. Where something is recomputed, a plan that may use the bytes can be faster or smaller: the step is
planned anew, once. A caller who holds what the plan counts on to go makes it be planned anew in any case.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .._torch import JointTrace
from ..console.log import log
from ..errors import BudgetTooSmall
from ..plans.planned_step import Plan
from ..plans.returning import same_runs
from ..stages import Captured, Planned, Renew, Runner
from ..units import format_bytes
from .returned import Holds, Returned, observes
from .way_down import can_be_planned_again, plan_step

__all__ = ["OtherHolds", "other_holds"]

WORTH_PLANNING = 0.01
"""The share of the peak that nobody holds from which on a step is planned anew; chosen."""


@dataclass(eq=False)
class OtherHolds:
    """What is known of the caller of a planned step, against what its plan counts on.

    `runner` is the step as it runs now; `planned` and the `trace` behind it are there until it is known what
    the caller does, and `before` is the plan that counted what is returned as held, where there was one.
    """

    holds: Holds
    returned: Returned
    runner: Runner
    planned: Planned | None
    trace: JointTrace | None
    before: Plan | None = None

    @property
    def plan(self) -> Plan:
        """The plan in force."""
        return self.returned.plan

    def found(self) -> bool:
        """Whether the caller was seen to do something else than the plan counts on."""
        if not self.holds.seen:
            return False
        if self.wanted() != self.returned.planned:
            return True
        self.planned = self.trace = None
        return False

    def wanted(self) -> frozenset[int]:
        """The places of what nobody holds, among those that this step returns."""
        released = self.holds.released or ()
        return frozenset(place for place in self.returned.names if place in released)

    def must(self) -> bool:
        """Whether something is held that the plan counts on to go."""
        return not self.returned.planned <= self.wanted()

    def prediction(self) -> Plan | None:
        """Another prediction for what the step does already; None where it is to be planned anew."""
        if self.must():
            return None if self.wanted() else self.before
        if self.planned is None or self.returned.planned or self.plan.method != "keep_all":
            return None
        priced = self.planned.priced
        asked = replace(priced.captured.asked, released=self.wanted())
        try:
            made = plan_step(replace(priced, captured=replace(priced.captured, asked=asked))).plan
        except BudgetTooSmall:  # of a share, which is one of another peak
            return None
        return made if same_runs(made.schedule, self.plan.schedule) else None

    def with_prediction(self, plan: Plan, renew: Renew) -> Runner:
        """The step as it runs, with another plan in its name."""
        self.before, self.planned, self.trace = self.plan, None, None
        self.returned.plan, self.returned.planned = plan, self.wanted()
        return replace(self.runner, plan=plan, renew=renew)

    def start(self) -> tuple[Captured | None, JointTrace | None]:
        """What another plan starts from, where it is kept: the captured step, and the trace behind it."""
        planned, trace = self.planned, self.trace
        self.planned = self.trace = None
        if planned is None or self.returned.planned or not can_be_planned_again(planned.priced.captured):
            return None, None
        return planned.priced.captured, trace

    def pays(self) -> bool:
        """Whether to plan anew."""
        if self.must():
            return True
        graph, names = self.plan.graph, {self.returned.names[place] for place in self.wanted()}
        size = sum(graph.value[name].bytes for name in names)
        if size < WORTH_PLANNING * self.plan.allocated:
            return False
        log.info(
            f"nobody holds {format_bytes(size)} of what the step returned when its backward begins: it is "
            "planned again with these bytes"
        )
        return True


def other_holds(
    holds: Holds, returned: Returned | None, runner: Runner, planned: Planned, trace: JointTrace
) -> OtherHolds | None:
    """What is compared before each call; None where nothing depends on the caller."""
    if returned is None or not observes(planned.priced.captured.asked.options):
        return None
    return OtherHolds(holds, returned, runner, planned, trace)
