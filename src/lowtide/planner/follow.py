"""A plan of the user's: followed where it is of this very step and keeps to the budget, refused elsewhere.

What a schedule takes depends on what else is there: optimizer state, other tensors on the device, measured
workspaces. So a plan is judged anew where it is followed, and a budget that it met elsewhere is no promise.
"""

from __future__ import annotations

from dataclasses import replace

from ..devices.memory import DeviceMemory
from ..errors import BudgetTooSmall, PlanMismatch
from ..plans.graph import Graph
from ..plans.planned_step import Plan, make_plan
from ..units import Budget, format_bytes
from .arenas import reserving, within
from .too_small import peak_parts
from .under_budget import size_of, uncapped, with_allocator_overhead

__all__ = ["follow", "plan_too_large", "refuse_if_too_large"]


def follow(
    plan: Plan, graph: Graph, budget: Budget | None, *, device: DeviceMemory, whole: int | None
) -> Plan:
    """A given plan on this graph, under the budget that was asked for, else under its own.

    `device` and `whole` are those of `plan_graph`.
    """
    if plan.graph.fingerprint != graph.fingerprint:
        raise PlanMismatch(
            f"the plan was made for another step: it has {len(plan.graph.ops)} ops and "
            f"{sum(v.bytes for v in plan.graph.values)} bytes of values, this step has {len(graph.ops)} and "
            f"{sum(v.bytes for v in graph.values)}. Plan this model, batch shape and device anew; "
            'with prices="measured" if it was planned without: kernels may need copies that tracing misses.'
        )
    size = plan.budget
    if budget is not None:
        size = size_of(budget, uncapped(graph, device), device, whole)
    made = make_plan(graph, plan.schedule, method=plan.method, budget=size, notes=plan.notes)
    made = with_allocator_overhead(
        replace(made, sketched=plan.sketched, trimmed=plan.trimmed, split=plan.split), device.blocks
    )
    if plan.compiled is None:
        return reserving(made, device) if size is None else within(made, device, size)
    beside = sum(made.graph.fixed.values()) - sum(plan.graph.fixed.values())
    return replace(made, compiled=plan.compiled + beside)


def refuse_if_too_large(plan: Plan, asked: Budget | None) -> None:
    """Raise where a followed plan takes more than its budget here."""
    if plan.budget is not None and plan.peak > plan.budget:
        raise plan_too_large(plan, asked)


def plan_too_large(plan: Plan, asked: Budget | None) -> BudgetTooSmall:
    """The error of a plan that was given and takes more than the budget: where its bytes are here."""
    assert plan.budget is not None
    parts = peak_parts(plan)
    listed = ", ".join(f"{name} {format_bytes(part)}" for name, part in parts.items() if part)
    whose = "its own budget" if asked is None else f"the budget {asked}"
    return BudgetTooSmall(
        f"the plan to follow takes {format_bytes(plan.peak)} here ({plan.peak} bytes: {listed}), more than "
        f"{whose} ({plan.budget} bytes). Leave plan= out to have the step planned anew under that budget, or "
        f"follow the plan with budget={plan.peak}.",
        budget=plan.budget,
        smallest=plan.peak,
        parts=parts,
    )
