"""The error of a budget below the smallest peak: what was asked, what is possible, where the bytes are."""

from __future__ import annotations

from ..errors import BudgetTooSmall
from ..plans.graph import GIVEN_KINDS, Op
from ..plans.planned_step import Plan
from ..plans.schedule import Run
from ..units import Budget, format_bytes

__all__ = ["peak_op", "peak_parts", "too_small", "with_split"]

KIB = 1024


def too_small(plan: Plan, asked: Budget, size: int) -> BudgetTooSmall:
    """The error of a budget below the smallest peak: the peak's parts by names the user knows."""
    parts = peak_parts(plan)
    listed = ", ".join(f"{name} {format_bytes(part)}" for name, part in parts.items() if part)
    op = peak_op(plan)
    where = f"; largest step at {op.where}" if op else ""
    least = format_bytes(plan.peak)
    return BudgetTooSmall(
        f"budget {asked} ({size} bytes) is below the smallest feasible peak found, {least} "
        f"({plan.peak} bytes: {listed}{where}). "
        f"Try budget={plan.peak}, a smaller batch, or fewer bytes of parameters and optimizer state."
        f"{_missing_unit(asked, size)}",
        budget=size,
        smallest=plan.peak,
        parts=parts,
    )


def with_split(error: BudgetTooSmall, peak: int) -> BudgetTooSmall:
    """The error, with the peak that the step can have if regions of it run in chunks of rows."""
    enough = "fits" if peak <= error.budget else "is possible"
    return BudgetTooSmall(
        f"{error} With split=True, which runs the head and MLPs a chunk of rows at a time (gradients equal "
        f"to rounding), {format_bytes(peak)} ({peak} bytes) {enough}.",
        budget=error.budget,
        smallest=error.smallest,
        parts=error.parts,
    )


def _missing_unit(asked: Budget, size: int) -> str:
    """No step fits into a few bytes: whoever writes so meant another unit, unless it was a share."""
    if size >= KIB or "%" in asked.text:
        return ""
    return f' Is a unit missing, as in "{size}GiB" or "{size}%"?'


def peak_parts(plan: Plan) -> dict[str, int]:
    """Where the bytes of a plan's peak are: parameters, gradients, inputs, fixed bands, activations."""
    graph = plan.graph
    parts = {"parameters": 0, "buffers": 0, "inputs": 0, "gradients": 0, **graph.fixed}
    names = {"parameter": "parameters", "buffer": "buffers", "input": "inputs", "accumulated": "gradients"}
    for value in graph.values:
        if value.kind in GIVEN_KINDS:
            parts[names[value.kind]] += value.bytes
    runs = {step.op for step in plan.schedule.steps[: plan.timeline.peak_step] if isinstance(step, Run)}
    made = {name for op in runs for name in graph.op[op].writes}
    parts["gradients"] += sum(
        graph.value[name].bytes for name in made if graph.value[name].kind == "gradient"
    )
    parts["activations"] = plan.allocated - sum(parts.values())
    if plan.peak > plan.allocated:
        parts["fragmentation"] = plan.peak - plan.allocated
    return parts


def peak_op(plan: Plan) -> Op | None:
    """The op that runs at the peak, or None between forward and backward."""
    steps, place = plan.schedule.steps, plan.timeline.peak_step
    step = steps[place] if place < len(steps) else None
    return plan.graph.op[step.op] if isinstance(step, Run) else None
