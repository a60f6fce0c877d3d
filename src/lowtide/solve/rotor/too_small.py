"""The error of a memory that is too small for a chain: the least one that would do.

A table rounds every size up to a unit, its memory over the number of units. So what suffices depends on the
number of units: the least memory whose own table has a plan. With very few units there is none.
"""

from __future__ import annotations

from ...errors import BudgetTooSmall
from .chain import UNITS
from .sizes import ChainSizes

__all__ = ["too_small"]


def too_small(sizes: ChainSizes, memory: int, units: int) -> BudgetTooSmall:
    """The error, with the least memory for these units, or for as many as it takes."""
    count = len(sizes.stages)
    least = _least(sizes, units)
    if least is not None:
        text = f"memory {memory} is too small for this chain of {count} stages; try {least} or more"
        return BudgetTooSmall(text, budget=memory, smallest=least)
    enough = max(UNITS, 2 * _most_units(sizes))
    least = _least(sizes, enough)
    assert least is not None, "twice the units that a plan takes at the least are enough"
    return BudgetTooSmall(
        f"memory {memory} in {units} units is too small for this chain of {count} stages: with sizes rounded "
        f"up to so few units no memory would do. Try units={enough} and a memory of {least} or more",
        budget=memory,
        smallest=least,
    )


def _most_units(sizes: ChainSizes) -> int:
    """The units that a plan takes where each size is one unit."""
    return sizes.least_memory(1 << 60)


def _least(sizes: ChainSizes, units: int) -> int | None:
    """The least memory whose table of n units has a plan.

    With a larger unit a plan takes fewer of them. So the least unit of which a plan takes no more than n is
    bracketed by doubling, then bisected.
    """
    if _most_units(sizes) > units:
        return None
    low = max(-(-sizes.least_memory() // units), 1) - 1
    step = 1
    while sizes.least_memory(low + step) > units:
        low, step = low + step, 2 * step
    high = low + step
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if sizes.least_memory(middle) > units else (low, middle)
    # Less than the second, and the table would have a smaller unit.
    return max(high * sizes.least_memory(high), (high - 1) * units + 1)
