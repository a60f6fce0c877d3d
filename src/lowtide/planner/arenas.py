"""What a plan makes the device reserve, and the arena that keeps it low: a free segment for all of the step.

A caching allocator that meets a step's requests one by one asks the device for a segment whenever no hole
fits. Where there is one large segment from the start, requests share it, and best fit leaves few holes: an
arena is reserved and let go before a plan's first step. Its size is found by replay of the loop: most often a
little more than what is alive in it, sometimes much less, where large requests fit each other's own segments.

Expandable segments are such an arena by themselves, and need none.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ..devices.memory import DeviceMemory
from ..devices.reserved import Loop, LoopPeaks
from ..plans.events import Event, events
from ..plans.planned_step import Plan
from ..plans.simulator import simulate

__all__ = ["ALLOCATOR", "allocated_alone", "least_reserving", "reserving", "within"]

ALLOCATOR = "allocator"
"""The band of what a caching allocator takes above the sum of the values."""

_PAGE = 2 * 2**20
_BESIDE = 2 * _PAGE
"""What a loop asks for between its steps: two segments of small requests."""
_AMPLE = 1.1
_SIZES = (1.005, 1.01, 1.02, 1.03, 1.045, 1.06, 1.09, 1.13, 1.18, 1.25, 0.9, 0.8, 0.7, 0.6, 0.5, 0.35, 0.2)
"""Arenas that are tried, as shares of what is alive in one. Chosen: twice as many find nothing that is better
by a percent on the steps of the head-to-head."""


def allocated_alone(device: DeviceMemory, because: str) -> tuple[str, ...]:
    """The note of a plan whose budget bounds what is allocated alone, for that reason or by its allocator."""
    if device.blocks is None:
        return ()
    if not device.settings.native:
        because = "another allocator than torch's own is set"
    if not because:
        return ()
    return (f"the budget bounds what is allocated, not what is reserved for that: {because}",)


def reserving(plan: Plan, device: DeviceMemory) -> Plan:
    """The plan with what a loop over it reserves if nothing is done about it, where that can be told."""
    if not device.says_reserved:
        return plan
    return _told(plan, _loop(plan, device).peaks())


def within(plan: Plan, device: DeviceMemory, limit: int, story: Iterable[Event] | None = None) -> Plan:
    """The plan with an arena that keeps what is reserved within a limit; without one where none does.

    An ample one is taken where there is room for it: the real requests are not known to the last byte.
    `story` is what the code of a compiled plan asks for, in place of what its schedule does.
    """
    if not device.says_reserved:
        return plan
    loop = _loop(plan, device, story)
    peaks = loop.peaks()
    plain = _told(plan, peaks, beside=_beside(peaks))
    if plan.is_plain and peaks.reserved <= limit:
        return _told(plan, peaks)
    if device.settings.expandable:
        return plain
    needed, most = _needed(plan, loop), (limit - loop.before - _BESIDE) // _PAGE * _PAGE
    small = plain.reserved - plain.allocated if plain.reserved is not None else 0
    wide = [min(_up(needed * _AMPLE), most), most, most - _up(min(small, needed // 20))]
    for arena in dict.fromkeys([*wide, *(_up(needed * size) for size in _SIZES)]):
        found = loop.peaks_below(limit - _BESIDE, arena=arena) if 0 < arena <= most else None
        if found is not None:
            return _told(plan, found, arena=arena, beside=_BESIDE)
    return plain


def least_reserving(plans: Iterable[Plan], device: DeviceMemory) -> Plan:
    """The one that reserves least, with its arena, of plans by rising bytes allocated."""
    best: Plan | None = None
    for plan in plans:
        if best is not None and plan.allocated >= best.peak:
            break
        best = _smallest(plan, device, best)
    assert best is not None
    return best


def _smallest(plan: Plan, device: DeviceMemory, best: Plan | None) -> Plan:
    """The better of a plan in its smallest arena and the best one so far."""
    if not device.says_reserved:
        return plan if best is None or plan.peak < best.peak else best
    loop = _loop(plan, device)
    peaks = loop.peaks()
    plain = _told(plan, peaks, beside=_beside(peaks))
    best = plain if best is None or plain.peak < best.peak else best
    if device.settings.expandable:
        return best
    needed = _needed(plan, loop)
    for size in _SIZES:
        arena = _up(needed * size)
        found = loop.peaks_below(best.peak - _BESIDE - 1, arena=arena)
        best = best if found is None else _told(plan, found, arena=arena, beside=_BESIDE)
    return best


def _told(plan: Plan, peaks: LoopPeaks, *, arena: int = 0, beside: int = 0) -> Plan:
    """The plan with what a replay shows: what blocks have above their requests depends on where these lie."""
    reserved = peaks.reserved + beside
    if plan.compiled is not None:
        compiled = max(plan.compiled, peaks.allocated)
        return replace(plan, compiled=compiled, reserved=reserved, arena=arena)
    fixed = {name: size for name, size in plan.graph.fixed.items() if name != ALLOCATOR}
    more = peaks.allocated - plan.timeline.peak + plan.graph.fixed.get(ALLOCATOR, 0)
    graph = plan.graph.replace(fixed={**fixed, ALLOCATOR: more} if more > 0 else fixed)
    return replace(plan, graph=graph, timeline=simulate(graph, plan.schedule), reserved=reserved, arena=arena)


def _beside(peaks: LoopPeaks) -> int:
    """What is counted beside the requests of a step without an arena: less for a small one."""
    return min(_BESIDE, peaks.reserved >> 7)


def _needed(plan: Plan, loop: Loop) -> int:
    """The bytes that live in an arena at once: what the step allocates above what is there before it."""
    return max(_up(plan.allocated - loop.before), _PAGE)


def _loop(plan: Plan, device: DeviceMemory, story: Iterable[Event] | None = None) -> Loop:
    story = events(plan.graph, plan.schedule) if story is None else story
    return Loop(plan.graph, story, segments=device.segments, settings=device.settings)


def _up(size: float) -> int:
    return -(-int(size) // _PAGE) * _PAGE
