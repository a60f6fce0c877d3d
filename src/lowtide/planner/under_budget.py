"""The one road to a plan under a budget, or to the error that says what is possible.

`budgets` says what a budget comes to. Where the device has a caching allocator, as CUDA, its rules are
replayed for every plan, so that the peak is the one that the allocator will report. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..devices.allocator import allocator_overhead
from ..devices.memory import DeviceMemory
from ..plans.graph import Graph
from ..plans.keep_all import keep_all
from ..plans.planned_step import Plan, make_plan
from ..plans.simulator import simulate
from ..solve import Method, find_method
from ..solve.search.native import build_ahead
from ..units import Budget, format_bytes, parse_budget
from .budgets import resolve
from .too_small import too_small

__all__ = ["get_ready", "plan_graph", "uncapped_peak", "with_allocator_overhead"]

ALLOCATOR = "allocator"
"""The band of what a caching allocator takes above the sum of the values."""


def get_ready() -> None:
    """Begin what the first plan on a machine needs, while a step is still being captured."""
    build_ahead()


def plan_graph(
    graph: Graph,
    budget: int | str | Budget | None,
    *,
    method: str = "auto",
    device: DeviceMemory | None = None,
    whole: int | None = None,
    headroom: int = 0,
    notes: tuple[str, ...] = (),
    search: Method | None = None,
) -> Plan:
    """The plan of a graph under a budget; raises `BudgetTooSmall` where none was found.

    `device` is what is known of the device's memory, `whole` the peak that a share is of, where that is not
    this very graph's; `headroom` bytes of the budget are left unused. `search` stands in for the method
    "auto" where a caller has one that knows other shapes (`OtherShapes`).
    """
    device = device or DeviceMemory(graph.device)
    graph, blocks = _bare(graph, device), device.blocks
    solve = search if search is not None and method == "auto" else find_method(method)
    vanilla = with_allocator_overhead(
        make_plan(graph, keep_all(graph), method="keep_all", notes=notes), blocks
    )
    if budget is None:
        return vanilla
    asked = parse_budget(budget)
    size = resolve(asked, vanilla.peak if whole is None else whole, device)
    if size is None:
        return with_allocator_overhead(make_plan(graph, solve(graph, 0), method=method, notes=notes), blocks)
    notes = (*notes, *_note_on_device(asked, min(size, vanilla.peak), device))
    limit = size - headroom
    if vanilla.peak <= limit:
        return replace(vanilla, budget=size, notes=notes)
    # The overhead depends on what else is on the device: a little stays free, where there is a plan for it.
    wanted = limit if blocks is None else limit - (size >> 10)
    room, step, tight = wanted, size >> 10, None
    while True:
        made = make_plan(graph, solve(graph, max(room, 0)), method=method, budget=size, notes=notes)
        plan = with_allocator_overhead(made, blocks)
        if plan.peak <= wanted:
            return plan
        if plan.peak <= limit:
            tight = tight or plan
        if made.peak > room:
            if tight is not None:
                return tight
            if room <= 0:
                raise too_small(plan, asked, size)
            room = 0  # some methods fit a budget only when they are asked for less
            continue
        # The next plan down may have as much overhead: the steps grow, so that a few see enough plans.
        room, step = room - max(plan.peak - wanted, step), 2 * step + 1


def uncapped_peak(graph: Graph, device: DeviceMemory) -> int:
    """The peak of keeping everything, as the allocator of the device would report it."""
    return with_allocator_overhead(make_plan(graph, keep_all(graph), method="keep_all"), device.blocks).peak


def _bare(graph: Graph, device: DeviceMemory) -> Graph:
    """The graph without the overhead of an allocator for another plan, where it is replayed for this one."""
    if device.blocks is None or ALLOCATOR not in graph.fixed:
        return graph
    return graph.replace(fixed={name: size for name, size in graph.fixed.items() if name != ALLOCATOR})


def _note_on_device(asked: Budget, size: int, device: DeviceMemory) -> tuple[str, ...]:
    """A share of the step's own peak may be more than there is; bytes that are not there were refused."""
    if not asked.is_share_of_peak or device.total is None or size <= device.total:
        return ()
    return (
        f"the budget {asked} of the uncapped peak comes to {format_bytes(size)}, more than the device "
        f'{device.name} has ({format_bytes(device.total)}); "90% of device" is a share of that',
    )


def with_allocator_overhead(plan: Plan, free: Sequence[int] | None) -> Plan:
    """The plan with what a caching allocator takes above the sum of the values, as a band of its own.

    Where steps start from depends on what else runs, such as `torch.cuda.empty_cache` between them: the worse
    of the blocks that are free now and of none.
    """
    starts = set() if free is None else {tuple(free), ()}
    excess = max((allocator_overhead(plan.graph, plan.schedule, start) for start in starts), default=0)
    if not excess:
        return plan
    graph = plan.graph.replace(fixed={**plan.graph.fixed, ALLOCATOR: excess})
    return replace(plan, graph=graph, timeline=simulate(graph, plan.schedule))
