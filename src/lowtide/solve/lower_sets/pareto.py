"""Which of many labels no other one beats, as operations on whole arrays.

A label has a value (to be large) and a number of bytes (to be small). Sorted by falling value, the unbeaten
ones are those with fewer bytes than all before them: a staircase, found by a running minimum. With a third
number the sweep goes by that number, and a label is compared with the staircase of all earlier ones.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["NEVER", "pareto", "staircase", "unbeaten"]

Numbers = NDArray[np.int64]
Seconds = NDArray[np.float64]
Index = NDArray[np.intp]

NEVER = int(np.iinfo(np.int64).max // 4)
"""More bytes than there are; two of them still fit into the type."""

BLOCK = 256


def staircase(sizes: Numbers) -> Index:
    """Of labels by falling value: those with fewer bytes than all before them; `NEVER` is not chosen."""
    least = np.minimum.accumulate(np.concatenate([[NEVER], sizes]))
    return np.flatnonzero(sizes < least[:-1])


def pareto(value: Seconds, sizes: Numbers) -> Index:
    """The labels that no other one beats in value and bytes, by falling value and bytes."""
    order = np.lexsort((sizes, -value))
    return order[staircase(sizes[order])]


def unbeaten(value: Seconds, sizes: Numbers, third: Numbers) -> Index:
    """Labels by falling value without most of those that another beats in value, bytes and a third number.

    The third number is to be small too. Labels of one block are not compared with each other, so some beaten
    ones stay.
    """
    order = np.lexsort((sizes, -value, third))
    kept, steps = [order[:0]], order[:0]
    for start in range(0, len(order), BLOCK):
        block = order[start : start + BLOCK]
        if len(steps):
            # Of the steps with at least the label's value, the last has the fewest bytes.
            at = np.searchsorted(-value[steps], -value[block], side="right") - 1
            block = block[(at < 0) | (sizes[steps[at]] > sizes[block])]
        kept.append(block)
        both = np.concatenate([steps, block])
        steps = both[pareto(value[both], sizes[both])]
    left = np.concatenate(kept)
    return left[np.lexsort((sizes[left], -value[left]))]
