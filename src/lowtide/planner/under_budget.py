"""A budget in bytes, and the plan that keeps to it or the error that says what is possible.

The budget is the whole peak of the step on its device, as the user would read it off the allocator.
A share is of the device's memory on CUDA and of the uncapped peak on the CPU, which has no limit of its own;
"free" is what the allocator holds, on the CPU what the step is given, plus what is free on the device; "min"
is the smallest peak found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from ..devices.allocator import allocator_overhead, free_blocks
from ..devices.table import find_device, host_memory_left, total_memory
from ..errors import BudgetError
from ..plans.graph import Graph
from ..plans.keep_all import keep_all
from ..plans.planned_step import Plan, make_plan
from ..plans.simulator import simulate
from ..solve import find_method
from ..units import Budget, format_bytes, parse_budget
from .too_small import too_small

__all__ = ["plan_graph", "resolve", "with_allocator_overhead"]


def plan_graph(
    graph: Graph,
    budget: int | str | Budget | None,
    *,
    method: str = "auto",
    memory: int | None = None,
    free: Sequence[int] | None = None,
    headroom: int = 0,
    notes: tuple[str, ...] = (),
) -> Plan:
    """The plan of a graph under a budget; raises `BudgetTooSmall` where none was found.

    `memory` is what the device has in bytes, where that limits anything; `free` are the free blocks of a
    caching allocator, where the device has one; `headroom` bytes of the budget are left unused.
    """
    solve = find_method(method)
    vanilla = with_allocator_overhead(make_plan(graph, keep_all(graph), method="keep_all", notes=notes), free)
    if budget is None:
        return vanilla
    asked = parse_budget(budget)
    if asked.word == "min":
        return with_allocator_overhead(make_plan(graph, solve(graph, 0), method=method, notes=notes), free)
    size = resolve(asked, graph, vanilla.peak, memory)
    limit = size - headroom
    if vanilla.peak <= limit:
        return replace(vanilla, budget=size)
    # What the allocator adds depends on what else is on the device: a little stays free, if a plan allows.
    wanted = limit if free is None else limit - (size >> 10)
    room, step, tight = wanted, size >> 10, None
    while True:
        made = make_plan(graph, solve(graph, max(room, 0)), method=method, budget=size, notes=notes)
        plan = with_allocator_overhead(made, free)
        if plan.peak <= wanted:
            return plan
        if plan.peak <= limit:
            tight = tight or plan
        if made.peak > room:
            if tight is None:
                raise too_small(plan, asked, size)
            return tight
        # The next plan down may have as much overhead: the steps grow, so that a few see enough plans.
        room, step = room - max(plan.peak - wanted, step), 2 * step + 1


def with_allocator_overhead(plan: Plan, free: Sequence[int] | None) -> Plan:
    """The plan with what a caching allocator books above the sum of the values, as a band of its own.

    Where steps start from depends on what else runs, such as `torch.cuda.empty_cache` between them: the worse
    of the blocks that are free now and of none.
    """
    starts = set() if free is None else {tuple(free), ()}
    excess = max((allocator_overhead(plan.graph, plan.schedule, start) for start in starts), default=0)
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
        return budget.part(whole)
    if budget.word == "free":
        return _free(graph)
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


def _free(graph: Graph) -> int:
    here = graph.device == "cpu" or (graph.device.startswith("cuda") and torch.cuda.is_available())
    if not here:
        raise BudgetError('budget "free" needs the device at hand; write bytes instead, as in "24GiB"')
    where = torch.device(graph.device)
    if where.type == "cuda":
        free, _ = torch.cuda.mem_get_info(where)
        return free + torch.cuda.memory_reserved(where)
    return graph.given_bytes + host_memory_left()
