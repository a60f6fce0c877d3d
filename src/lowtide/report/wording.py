"""How the reports name steps and ops."""

from __future__ import annotations

from ..plan import Plan
from ..schedule import Run
from ..units import format_bytes
from .stays import peak_is_between

__all__ = ["describe", "peak_moment", "short"]


def short(text: str, most: int = 90) -> str:
    """Text of a bounded length that can be written as UTF-8, cut in the middle where it is too long."""
    text = text.encode("utf-8", "replace").decode("utf-8")
    if len(text) <= most:
        return text
    head = most // 2
    return f"{text[:head]}…{text[len(text) - (most - head - 1) :]}"


def describe(plan: Plan, index: int, *, again: bool = False) -> str:
    """What a step does: the op and where the user wrote it, or the value that it drops."""
    step = plan.schedule.steps[index]
    if not isinstance(step, Run):
        return f"drops {short(step.value)}"
    op = plan.graph.op[step.op]
    where = [short(part) for part in (op.module, op.source) if part]
    return ", ".join([f"runs {short(op.name)}{' again' if again else ''}", *where])


def peak_moment(plan: Plan) -> str:
    """When the peak is reached, in one sentence."""
    size = format_bytes(plan.peak)
    if peak_is_between(plan):
        return f"The peak of {size} is reached between the forward and the backward."
    index = plan.timeline.peak_step
    phase = "forward" if index < plan.timeline.boundary else "backward"
    return f"The peak of {size} is reached at step {index} ({phase}), which {describe(plan, index)}."
