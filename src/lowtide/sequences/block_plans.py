"""What the scans of a stock recurrent module are planned to do.

Blocks: the longer, the fewer calls, and the fewer blocks can be kept recorded. Under a budget lengths of
1, 2, 4, ... steps are weighed and planned, and the one is taken whose runs cost least, a call counted as
`CALL` steps. Where blocks can be captured as graphs (`graph_loop`), each length is planned in both ways: to
launch a graph costs less than a call, but a block has places in memory besides, and every one is recomputed.

Several scans share a budget. What is kept of all is there at the same time, the working set of only one; so
beside the largest working set and what each scan leaves behind at least, all get the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Several
from typing import TypeAlias

from ..errors import BudgetTooSmall, LowtideError
from ..units import Budget, format_bytes
from .planned_scan import ScanPlan, make_graph_plan, make_scan_plan
from .sizes import Sizes
from .ways import Way

__all__ = ["chosen_plans", "plans_by_slots"]

CALL = 8
"""What a call costs beside its steps, in steps: near enough for small cells on a GPU."""

LAUNCH = 5
"""What it costs to launch a block as a graph, in steps: copies to its places and back, and some Python."""

CAPTURE = 5
"""What it costs to capture a block, for each of its steps, in steps."""

LONGEST = 64
"""Longer blocks save next to nothing."""

Weigh: TypeAlias = Callable[[Way, int], Sizes]
Places: TypeAlias = Callable[[Way, int], int]


def plans_by_slots(
    ways: Several[Way], steps: int, slots: int, chunk: int | None, weigh: Weigh | None
) -> tuple[ScanPlan, ...]:
    """The plans for a number of carries in each scan; their bytes too, where they can be weighed."""
    length = chunk or max(1, min(2 * CALL, steps // max(slots, 1)))
    return tuple(
        make_scan_plan(steps, chunk=length, slots=slots, sizes=weigh(way, length) if weigh else None)
        for way in ways
    )


def chosen_plans(
    ways: Several[Way],
    steps: int,
    budget: Budget | None,
    chunk: int | None,
    weigh: Weigh,
    base: int,
    headroom: int,
    places: Places | None = None,
    graphs_only: bool = False,
) -> tuple[ScanPlan, ...]:
    """The plans for a budget, in blocks of `chunk` steps or of as many as cost least.

    A block takes at least `base` bytes, however short, and to weigh it `headroom` bytes more for each step;
    blocks that must be too large for the budget are not weighed. With `places`, the bytes of the places of a
    block that runs as a graph, there may be graphs; `graphs_only` prefers any of these.
    """
    if budget is None or budget.word is not None:
        return _plans(ways, steps, budget, chunk or 1, weigh)
    size = budget.bytes or budget.part(_whole(ways, steps, weigh, chunk))
    asked = Budget(budget.text, bytes=size)
    found = [_plans(ways, steps, asked, chunk or 1, weigh)]
    if chunk is None:
        found += _longer(found[0], ways, steps, asked, weigh, base, headroom)
    graphs = []
    if places is not None:
        graphs = [made for plans in found if (made := _in_graphs(ways, plans, asked, places))]
    return min(graphs if graphs and graphs_only else found + graphs, key=_cost)


def _longer(
    single: tuple[ScanPlan, ...],
    ways: Several[Way],
    steps: int,
    asked: Budget,
    weigh: Weigh,
    base: int,
    headroom: int,
) -> list[tuple[ScanPlan, ...]]:
    """The plans in blocks of more than a step, as long as they may fit."""
    assert asked.bytes is not None
    found = [single]
    for length in _lengths(steps):
        if _guess(found, length, base) + headroom * length > asked.bytes:
            break
        try:
            found.append(_plans(ways, steps, asked, length, weigh))
        except BudgetTooSmall:
            break
    return found[1:]


def _whole(ways: Several[Way], steps: int, weigh: Weigh, chunk: int | None) -> int:
    """What keeping every step takes; as single steps may take more than blocks, a block is weighed too."""
    lengths = {chunk} if chunk else {1, max(1, min(LONGEST, steps // LONGEST))}
    return min(
        sum(plan.keep_all or 0 for plan in _plans(ways, steps, None, length, weigh)) for length in lengths
    )


def _lengths(steps: int) -> list[int]:
    return [min(2**power, steps) for power in range(1, LONGEST.bit_length()) if 2 ** (power - 1) < steps]


def _guess(found: Several[tuple[ScanPlan, ...]], length: int, base: int) -> int:
    """About what a block of that length takes: from the longest so far, as much for each step."""
    (before, less), (last, most) = [(0, base), *((plans[0].chunk, _work(plans)) for plans in found)][-2:]
    return most + (most - less) * (length - last) // (last - before)


def _work(plans: Several[ScanPlan]) -> int:
    return max(plan.sizes.work for plan in plans if plan.sizes is not None)


def _cost(plans: Several[ScanPlan]) -> float:
    """The steps that run, forward and backward, with what their calls cost."""
    return sum(_graph_cost(plan) if plan.graphs else _call_cost(plan) for plan in plans)


def _call_cost(plan: ScanPlan) -> float:
    return (plan.forward_count + 2 * plan.steps) * (1 + CALL / plan.chunk)


def _graph_cost(plan: ScanPlan) -> float:
    launches = plan.forward_count / plan.chunk
    return plan.forward_count + 2 * plan.steps + CAPTURE * plan.chunk + LAUNCH * launches


def _plans(
    ways: Several[Way], steps: int, budget: Budget | None, chunk: int, weigh: Weigh
) -> tuple[ScanPlan, ...]:
    sizes = [weigh(way, chunk) for way in ways]
    whole = tuple(make_scan_plan(steps, chunk=chunk, sizes=size) for size in sizes)
    if budget is None:
        return whole
    if len(ways) == 1:
        return (make_scan_plan(steps, chunk=chunk, sizes=sizes[0], budget=budget),)
    shares = _shares(budget, sizes, -(-steps // chunk), sum(plan.keep_all or 0 for plan in whole))
    return tuple(
        make_scan_plan(steps, chunk=chunk, sizes=size, budget=share)
        for size, share in zip(sizes, shares, strict=True)
    )


def _in_graphs(
    ways: Several[Way], plans: Several[ScanPlan], budget: Budget, places: Places
) -> tuple[ScanPlan, ...] | None:
    """The same blocks as graphs; None where the budget is too small for them, or there is one block."""
    steps, chunk = plans[0].steps, plans[0].chunk
    sizes = [_with_places(plan.sizes, places(way, chunk)) for way, plan in zip(ways, plans, strict=True)]
    assert budget.bytes is not None
    try:
        shares = [budget.bytes] if len(ways) == 1 else _shares(budget, sizes, -(-steps // chunk), 0)
    except BudgetTooSmall:
        return None
    made = [
        make_graph_plan(
            steps,
            chunk=chunk,
            sizes=size,
            budget=share,
            keep_all=plan.keep_all,
            recomputes_last=steps % chunk == 0,
        )
        for plan, size, share in zip(plans, sizes, shares, strict=True)
    ]
    found = tuple(plan for plan in made if plan is not None)
    return found if len(found) == len(ways) and steps >= 2 * chunk else None


def _with_places(sizes: Sizes | None, places: int) -> Sizes:
    """The bytes of a block that runs as a graph: a unit is recorded only while it goes back."""
    assert sizes is not None
    work = places + sizes.work - sizes.start
    return Sizes(sizes.state, places, work, work, 0, sizes.start)


def _shares(budget: Budget, sizes: Several[Sizes], units: int, whole: int) -> list[int]:
    """The budget of each scan."""
    left = [size.start + size.record + size.gradient for size in sizes]
    fixed = max(size.work + sum(left) - own for size, own in zip(sizes, left, strict=True))
    carry = 0 if units == 1 else max(min(size.state, (units - 1) * size.record) for size in sizes)
    least = fixed + len(sizes) * carry
    if budget.word is not None and budget.word != "min":
        raise LowtideError(f'budget {budget} is not known here; write bytes, "2GiB", "5%" or "min"')
    asked = least if budget.word else budget.bytes or budget.part(whole)
    if asked < least:
        raise BudgetTooSmall(
            f"budget {budget} ({asked} bytes) is below the smallest that these {len(sizes)} scans, one for "
            f"each layer and direction, can run in together: {least} bytes ({format_bytes(least)}: one step "
            f"and what the other scans leave take {format_bytes(fixed)}, kept carries "
            f"{format_bytes(least - fixed)}). "
            f'Try budget={least} or "min", a smaller batch, or chunk=1',
            budget=asked,
            smallest=least,
            parts={"one step": fixed, "kept carries": least - fixed},
        )
    return [size.work + (asked - fixed) // len(sizes) for size in sizes]
