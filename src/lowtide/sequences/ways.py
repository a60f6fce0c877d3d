"""The scans that a stock recurrent module takes, and what each is planned to do.

A stack of layers in one direction is one scan, whose unit runs all layers on a block. A bidirectional stack
is one scan for each layer and direction, as a layer needs the whole output of the one before.

Blocks: the longer, the fewer calls, and the fewer blocks can be kept recorded. Under a budget lengths of
1, 2, 4, ... steps are weighed and planned, and the one is taken whose runs cost least, a call counted as
`CALL` steps.

Several scans share a budget. What is kept of all is there at the same time, the working set of only one; so
beside the largest working set and what each scan leaves behind at least, all get the same room.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Several
from dataclasses import dataclass
from typing import TypeAlias

from torch import nn

from ..errors import BudgetTooSmall, LowtideError
from ..units import Budget, format_bytes
from .plan import ScanPlan, make_scan_plan
from .sizes import Sizes

__all__ = ["Way", "chosen_plans", "plans_by_slots", "ways_of"]

CALL = 8
"""What a call costs beside its steps, in steps: near enough for small cells on a GPU."""

LONGEST = 64
"""Longer blocks save next to nothing."""

Weigh: TypeAlias = Callable[["Way", int], Sizes]


@dataclass(frozen=True)
class Way:
    """One scan: some layers in one direction, where they stand in the carry, and the width of their input."""

    layers: range
    reverse: bool
    place: int
    features: int


def ways_of(module: nn.RNNBase) -> list[Way]:
    """The scans of a module, in the order in which they run."""
    if not module.bidirectional:
        return [Way(range(module.num_layers), False, 0, module.input_size)]
    hidden = 2 * (module.proj_size or module.hidden_size)
    return [
        Way(range(layer, layer + 1), reverse, 2 * layer + reverse, hidden if layer else module.input_size)
        for layer in range(module.num_layers)
        for reverse in (False, True)
    ]


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
    spare: int,
) -> tuple[ScanPlan, ...]:
    """The plans for a budget, in blocks of `chunk` steps or of as many as cost least.

    A block takes at least `base` bytes, however short, and to weigh it `spare` bytes more for each step;
    blocks that must be too large for the budget are not weighed.
    """
    if chunk is not None or budget is None or budget.word is not None:
        return _plans(ways, steps, budget, chunk or 1, weigh)
    size = budget.bytes or int((budget.share or 0) * _whole(ways, steps, weigh))
    asked = Budget(budget.text, bytes=size)
    found = [_plans(ways, steps, asked, 1, weigh)]
    for length in _lengths(steps):
        if _guess(found, length, base) + spare * length > size:
            break
        try:
            found.append(_plans(ways, steps, asked, length, weigh))
        except BudgetTooSmall:
            break
    return min(found, key=_cost)


def _whole(ways: Several[Way], steps: int, weigh: Weigh) -> int:
    """What keeping every step takes; as single steps may take more than blocks, a block is weighed too."""
    lengths = {1, max(1, min(LONGEST, steps // LONGEST))}
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
    return sum((plan.forward_count + 2 * plan.steps) * (1 + CALL / plan.chunk) for plan in plans)


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


def _shares(budget: Budget, sizes: Several[Sizes], units: int, whole: int) -> list[int]:
    """The budget of each scan."""
    left = [size.start + size.record + size.gradient for size in sizes]
    fixed = max(size.work + sum(left) - own for size, own in zip(sizes, left, strict=True))
    carry = 0 if units == 1 else max(min(size.state, (units - 1) * size.record) for size in sizes)
    least = fixed + len(sizes) * carry
    if budget.word is not None and budget.word != "min":
        raise LowtideError(f'budget {budget} is not known here; write bytes, "2GiB", "5%" or "min"')
    asked = least if budget.word else budget.bytes or int((budget.share or 0) * whole)
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
