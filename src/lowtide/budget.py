"""A budget in bytes, and the plan that keeps to it or the error that says what is possible.

The budget is the whole peak of the step on its device, as the user would read it off the allocator.
A share is of the device's memory on CUDA and of the uncapped peak on the CPU, which has no limit of its own;
"free" is what the allocator holds plus what is free on the device; "min" is the smallest peak found.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

import torch

from .allocator import booked_excess, free_blocks
from .devices import find_device, total_memory
from .errors import BudgetError, BudgetTooSmall
from .graph import GIVEN_KINDS, Graph, Op
from .plan import Plan, make_plan
from .schedule import Run
from .simulate import simulate
from .solve import find_method
from .solve.keep_all import keep_all
from .units import Budget, format_bytes, parse_budget

__all__ = ["booked", "plan_graph", "resolve"]


def plan_graph(
    graph: Graph,
    budget: int | str | Budget | None,
    *,
    method: str = "auto",
    memory: int | None = None,
    free: Sequence[int] | None = None,
    notes: tuple[str, ...] = (),
) -> Plan:
    """The plan of a graph under a budget; raises `BudgetTooSmall` where none was found.

    `memory` is what the device has in bytes, where that limits anything; `free` are the free blocks of a
    caching allocator, where the device has one.
    """
    solve = find_method(method)
    vanilla = booked(make_plan(graph, keep_all(graph), method="keep_all", notes=notes), free)
    if budget is None:
        return vanilla
    asked = parse_budget(budget)
    if asked.word == "min":
        return booked(make_plan(graph, solve(graph, 0), method=method, notes=notes), free)
    size = resolve(asked, graph, vanilla.peak, memory)
    if vanilla.peak <= size:
        return replace(vanilla, budget=size)
    room = size
    for _ in range(_ROUNDS):
        plan = booked(make_plan(graph, solve(graph, room), method=method, budget=size, notes=notes), free)
        if plan.peak <= size:
            return plan
        room -= plan.peak - size
    plan = booked(make_plan(graph, solve(graph, 0), method=method, budget=size, notes=notes), free)
    if plan.peak > size:
        raise too_small(plan, asked, size)
    return plan


_ROUNDS = 4
"""How often to plan again with less room, when the allocator books more than the sum of the values."""


def booked(plan: Plan, free: Sequence[int] | None) -> Plan:
    """The plan with what a caching allocator books above the sum of the values, as a band of its own."""
    excess = 0 if free is None else booked_excess(plan.graph, plan.schedule, free)
    if not excess:
        return plan
    graph = plan.graph.replace(fixed={**plan.graph.fixed, "allocator": excess})
    return replace(plan, graph=graph, timeline=simulate(graph, plan.schedule))


def resolve(budget: Budget, graph: Graph, uncapped: int, memory: int | None) -> int:
    """The bytes of a budget."""
    if budget.share is not None:
        whole = uncapped if memory is None else memory
        if memory is not None and budget.share > 1:
            raise BudgetError(f"budget {budget} is more than the device has ({format_bytes(memory)})")
        return int(budget.share * whole)
    if budget.word == "free":
        return _free(graph.device)
    assert budget.bytes is not None
    limit = memory if memory is not None else _host_memory(graph.device)
    if limit is not None and budget.bytes > limit:
        raise BudgetError(
            f"budget {budget} is more than the device {graph.device} has ({format_bytes(limit)}). "
            f'Try budget="{limit}" or less, or "free".'
        )
    return budget.bytes


def _host_memory(device: str) -> int | None:
    return total_memory(torch.device("cpu")) if device == "cpu" else None


def device_memory(device: torch.device, target: str | None) -> int | None:
    """The memory that limits a budget: that of a GPU, here or in the table; None on the CPU."""
    if target is not None:
        known = find_device(target)
        return known.memory if known.type == "cuda" else None
    return total_memory(device) if device.type == "cuda" else None


def device_blocks(device: torch.device, target: str | None) -> list[int] | None:
    """The free blocks of a device's caching allocator; none yet on one that is absent, None on the CPU."""
    if target is not None:
        return [] if find_device(target).type == "cuda" else None
    return free_blocks(device) if device.type == "cuda" else None


def _free(device: str) -> int:
    if device != "cpu" and not torch.cuda.is_available():
        raise BudgetError('budget "free" needs the device at hand; write bytes instead, as in "24GiB"')
    where = torch.device(device)
    if where.type == "cuda":
        free, _ = torch.cuda.mem_get_info(where)
        return free + torch.cuda.memory_reserved(where)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


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
        f"Try budget={plan.peak}, a smaller batch, or fewer bytes of parameters and optimizer state.",
        budget=size,
        smallest=plan.peak,
        parts=parts,
    )


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
    parts["activations"] = plan.peak - sum(parts.values())
    return parts


def peak_op(plan: Plan) -> Op | None:
    """The op that runs at the peak, or None between forward and backward."""
    steps, place = plan.schedule.steps, plan.timeline.peak_step
    step = steps[place] if place < len(steps) else None
    return plan.graph.op[step.op] if isinstance(step, Run) else None
