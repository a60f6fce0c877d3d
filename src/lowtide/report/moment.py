"""How the reports name a step, and the moment of the peak."""

from __future__ import annotations

from ..plans.planned_step import Plan
from ..plans.schedule import Run
from ..units import format_bytes
from .peak import peak_is_between
from .wording import short

__all__ = ["describe", "peak_moment"]


def describe(plan: Plan, index: int, *, again: bool = False) -> str:
    """What a step does: the op and where the user wrote it, or the value that it drops."""
    step = plan.schedule.steps[index]
    if not isinstance(step, Run):
        return f"drops {short(step.value)}"
    op = plan.graph.op[step.op]
    where = [short(part) for part in (op.module, op.source) if part]
    return ", ".join([f"{'recomputes' if again else 'runs'} {short(op.name)}", *where])


def peak_moment(plan: Plan) -> str:
    """When the peak is reached, in one sentence."""
    size = format_bytes(plan.timeline.peak)
    if peak_is_between(plan):
        return f"The peak of {size} is reached between the forward and the backward."
    index = plan.timeline.peak_step
    phase = "forward" if index < plan.timeline.boundary else "backward"
    return f"The peak of {size} is reached at step {index} ({phase}), which {describe(plan, index)}."
