"""The one road to a plan under a budget, or to the error that says what is possible.

`budgets` says what a budget comes to. Where the device has a caching allocator, as CUDA, its rules are
replayed for every plan, so that the peak is the one that the allocator will report: what is allocated, and
what is reserved for that, which the budget bounds (`arenas`). No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..devices.allocator import allocator_overhead
from ..devices.memory import DeviceMemory
from ..plans.graph import Graph
from ..plans.keep_all import keep_all
from ..plans.patience import PLANNING_SECONDS, planning_for
from ..plans.planned_step import Plan, make_plan
from ..plans.simulator import simulate
from ..solve import Method, find_method
from ..solve.auto import at_hand, knee_rung, rungs
from ..solve.knee import Point, cliff
from ..solve.search.build import build_ahead
from ..units import Budget, format_bytes, parse_budget
from .arenas import ALLOCATOR, least_reserving, reserving, within
from .budgets import resolve
from .fitting import Fitting
from .too_small import too_small

__all__ = [
    "get_ready",
    "knee_of",
    "plan_graph",
    "settled",
    "size_of",
    "uncapped",
    "uncapped_peak",
    "with_allocator_overhead",
]

_FEW = 600
"""Ops up to which each plan that is tried for a caching allocator is searched for: a tenth of a second each
(benchmarks/fragmentation.py). Above it, after the first one, they are what the search has found so far."""
_SLACK = 7
"""A plan leaves a 128th of its budget free where one does: on an H200 steps asked for up to 1.2 % more than
was replayed, and ran out of memory in a process limited to their budget (benchmarks/hard_limit.py)."""

_smallest: dict[Any, Plan] = {}
_MOST_KNOWN = 8


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
        return _under_budget(graph, budget, solve, method, device, whole, headroom, notes)


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
    graph = _bare(graph, device)
    vanilla = uncapped(graph, device, notes)
    if budget is None:
        return vanilla
    asked = settled(parse_budget(budget), graph, device)
    size = size_of(asked, vanilla, device, whole)

    def made(room: int, anew: bool) -> tuple[Plan, int]:
        anew = anew or method != "auto" or len(graph.ops) <= _FEW
        found = None if anew else at_hand(graph, room)
        plan = make_plan(graph, found or solve(graph, max(room, 0)), method=method, notes=notes)
        return with_allocator_overhead(plan, device.blocks), plan.allocated

    search = Fitting(device, made, whole=vanilla.allocated if method == "auto" else 0)
    if size is None:
        return _with_cliff(replace(search.least(), smallest=True), graph, vanilla)
    notes, limit = (*notes, *_note_on_device(asked, min(size, vanilla.peak), device)), size - headroom
    vanilla = within(vanilla, device, limit)
    if vanilla.peak <= limit:
        return replace(vanilla, budget=size, notes=notes)
    found = _fastest(search, graph, limit)
    if limit < found.peak and device.has_run and found.allocated <= limit:
        return _in_holes(found, size)
    if found.peak > limit:
        raise too_small(found, asked, size)
    return _with_cliff(replace(found, budget=size), graph, vanilla)


def _fastest(search: Fitting, graph: Graph, limit: int) -> Plan:
    """The fastest plan found within a limit, a little below it where one is, else one with a small peak."""
    device = search.device
    if not device.says_reserved:
        return search.below(limit)
    found = search.below(limit - (limit >> _SLACK))
    if found.peak > limit:
        found = _smallest_known(search.below(limit), graph, device)
    if found.peak > limit and device.has_run:
        found = min(found, search.least(most=limit), key=lambda plan: (plan.allocated > limit, plan.peak))
    return found


def _smallest_known(plan: Plan, graph: Graph, device: DeviceMemory) -> Plan:
    """The smaller of a plan and what was found for the same graph in the same memory before.

    Which holes a plan leaves is luck: another search may miss what the error of an earlier one has named.
    """
    key = graph, plan.method, device.segments, device.settings
    best = min(plan, _smallest.pop(key, plan), key=lambda each: each.peak)
    _smallest[key] = best
    while len(_smallest) > _MOST_KNOWN:
        del _smallest[next(iter(_smallest))]
    return replace(best, notes=plan.notes)


def size_of(asked: Budget, vanilla: Plan, device: DeviceMemory, whole: int | None) -> int | None:
    """The bytes of a budget; a share of all or more is the uncapped step, with what that reserves."""
    base = vanilla.allocated if whole is None else whole
    size = resolve(asked, base, device)
    if size is None or not asked.is_share_of_peak or size < base:
        return size
    return max(size, vanilla.peak)


def _in_holes(plan: Plan, size: int) -> Plan:
    """The plan that reserves least between what lies there by now: told, as the next step is under way."""
    assert plan.reserved is not None
    note = (
        f"what earlier steps have left on the device is in the way: this step may reserve up to "
        f"{format_bytes(plan.reserved - size)} more than its budget of {format_bytes(size)}"
    )
    return replace(plan, reserved=None, budget=size, notes=(*plan.notes, note))


def uncapped(graph: Graph, device: DeviceMemory, notes: tuple[str, ...] = ()) -> Plan:
    """The plan that keeps everything."""
    plan = make_plan(graph, keep_all(graph), method="keep_all", notes=notes)
    return reserving(with_allocator_overhead(plan, device.blocks), device)


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
    made = with_allocator_overhead(
        make_plan(bare, find_method("auto")(bare, found.peak), method="auto"), device.blocks
    )
    size = least_reserving([made], device).peak
    if device.says_reserved:
        size = size * 128 // 127 + 1
    return Budget(asked.text, bytes=size * 1024 // 1023 + 1)  # with what a plan leaves free


def _with_cliff(plan: Plan, bare: Graph, vanilla: Plan) -> Plan:
    """The plan, with a note where its budget is just below a cliff; only `auto` has a ladder to see it on."""
    if plan.method != "auto":
        return plan
    told = plan.budget or plan.peak
    limit = told if plan.reserved is None else plan.allocated
    overhead = plan.graph.fixed_bytes - bare.fixed_bytes
    points = (Point(rung.peak + overhead, rung.seconds) for rung in rungs(bare))
    found = cliff(points, Point(limit, plan.seconds), Point(vanilla.allocated, vanilla.seconds))
    if found is None:
        return plan
    enough = found.peak + told - limit
    note = (
        f"just below a cliff: with a budget of {enough} ({format_bytes(enough)}, "
        f"{enough / told - 1:.1%} more) the step takes {found.seconds / vanilla.seconds - 1:+.1%} of time "
        f"instead of {plan.extra:+.1%}"
    )
    return replace(plan, notes=(*plan.notes, note))


def uncapped_peak(graph: Graph, device: DeviceMemory) -> int:
    """The bytes allocated at the peak of keeping everything, as the device's allocator would report them."""
    return uncapped(graph, device).allocated


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
