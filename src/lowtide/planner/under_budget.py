"""The one road to a plan under a budget, or to the error that says what is possible.

`budgets` says what a budget comes to. Where the device has a caching allocator, as CUDA, its rules are
replayed for every plan, so that the peak is the one that the allocator will report. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..devices.allocator import allocator_overhead
from ..devices.memory import DeviceMemory
from ..devices.reserved import loop_peaks
from ..plans.graph import Graph
from ..plans.keep_all import keep_all
from ..plans.patience import PLANNING_SECONDS, planning_for
from ..plans.planned_step import Plan, make_plan
from ..plans.simulator import simulate
from ..solve import Method, find_method
from ..solve.auto import knee_rung, rungs
from ..solve.knee import Point, cliff
from ..solve.search.build import build_ahead
from ..units import Budget, format_bytes, parse_budget
from .budgets import resolve
from .too_small import too_small

__all__ = [
    "get_ready",
    "knee_of",
    "plan_graph",
    "settled",
    "uncapped_peak",
    "with_allocator_overhead",
    "with_reserved",
]

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
    planning_seconds: float = PLANNING_SECONDS,
    search: Method | None = None,
) -> Plan:
    """The plan of a graph under a budget; raises `BudgetTooSmall` where none was found.

    `device` is what is known of the device's memory, `whole` the peak that a share is of, where that is not
    this very graph's; `headroom` bytes of the budget are left unused. `search` stands in for the method
    "auto" where a caller has one that knows other shapes (`OtherShapes`).
    Where `planning_seconds` are over, the best plan until then is taken.
    """
    device = device or DeviceMemory(graph.device)
    solve = search if search is not None and method == "auto" else find_method(method)
    with planning_for(planning_seconds):
        made = _under_budget(graph, budget, solve, method, device, whole, headroom, notes)
        return with_reserved(made, device)


def _under_budget(
    graph: Graph,
    budget: int | str | Budget | None,
    solve: Method,
    method: str,
    device: DeviceMemory,
    whole: int | None,
    headroom: int,
    notes: tuple[str, ...],
) -> Plan:
    """The plan of `plan_graph`, by what it allocates."""
    graph, blocks = _bare(graph, device), device.blocks
    vanilla = with_allocator_overhead(
        make_plan(graph, keep_all(graph), method="keep_all", notes=notes), blocks
    )
    if budget is None:
        return vanilla
    whole_step = Point(vanilla.peak, vanilla.seconds)
    asked = settled(parse_budget(budget), graph, device)
    size = resolve(asked, vanilla.peak if whole is None else whole, device)
    if size is None:
        made = with_allocator_overhead(make_plan(graph, solve(graph, 0), method=method, notes=notes), blocks)
        return _with_cliff(replace(made, smallest=True), graph, whole_step)
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
            return _with_cliff(plan, graph, whole_step)
        if plan.peak <= limit:
            tight = tight or plan
        if made.peak > room:
            if tight is not None:
                return _with_cliff(tight, graph, whole_step)
            if room <= 0:
                raise too_small(plan, asked, size)
            room = 0  # some methods fit a budget only when they are asked for less
            continue
        # The next plan down may have as much overhead: the steps grow, so that a few see enough plans.
        room, step = room - max(plan.peak - wanted, step), 2 * step + 1


def knee_of(graph: Graph, device: DeviceMemory) -> Point:
    """The peak and the seconds of the plan below which memory costs more than its share of time.

    What a caching allocator adds, which differs from plan to plan, is not in it.
    """
    rung = knee_rung(_bare(graph, device))
    return Point(rung.peak, rung.seconds)


def settled(asked: Budget, graph: Graph, device: DeviceMemory) -> Budget:
    """The budget, where it is the knee with the bytes that it comes to for this graph."""
    if not asked.is_knee:
        return asked
    bare, found = _bare(graph, device), knee_of(graph, device)
    if device.blocks is None:
        return Budget(asked.text, bytes=found.peak)
    made = make_plan(bare, find_method("auto")(bare, found.peak), method="auto")
    # With the thousandth that a plan leaves free.
    return Budget(asked.text, bytes=with_allocator_overhead(made, device.blocks).peak * 1024 // 1023 + 1)


def _with_cliff(plan: Plan, bare: Graph, whole: Point) -> Plan:
    """The plan, with a note where its budget is just below a cliff; only `auto` has a ladder to see it on."""
    if plan.method != "auto":
        return plan
    limit, overhead = plan.budget or plan.peak, plan.graph.fixed_bytes - bare.fixed_bytes
    points = (Point(rung.peak + overhead, rung.seconds) for rung in rungs(bare))
    found = cliff(points, Point(limit, plan.seconds), whole)
    if found is None:
        return plan
    note = (
        f"just below a cliff: with a budget of {found.peak} ({format_bytes(found.peak)}, "
        f"{found.peak / limit - 1:.1%} more) the step takes {found.seconds / whole.seconds - 1:+.1%} of time "
        f"instead of {plan.extra:+.1%}"
    )
    return replace(plan, notes=(*plan.notes, note))


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


def with_reserved(plan: Plan, device: DeviceMemory) -> Plan:
    """The plan with what a loop over it makes the allocator reserve, where its rules are known."""
    if device.blocks is None or not device.settings.native:
        return plan
    peaks = loop_peaks(plan.graph, plan.schedule, segments=device.segments, settings=device.settings)
    return replace(plan, reserved=peaks.reserved)
