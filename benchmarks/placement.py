"""Offline placement of a step's requests in one arena: every lifetime is known before the step runs.

Dynamic storage allocation (intervals of time with a height, none may overlap in both): NP-hard, and often
within a few percent of the lower bound, the most bytes alive at once, by simple means. First fit in some
order: each request gets the lowest offset at which it meets no request that was placed before and that is
alive with it. Orders: by size, by lifetime, by their product, by start. Then a local search: the request
that reaches highest is moved to the front of the best order, and all are placed again. No torch. O(n²)
for each order, with a small constant: those that are not alive at the same time are passed over.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["Arena", "Stay", "best_arena", "first_fit", "height", "live_peak"]


@dataclass(frozen=True, slots=True)
class Stay:
    """Bytes that are there from `start` up to, not including, `end`."""

    size: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Arena:
    """The bytes of an arena, the order that its placement began with, and the offset of each stay."""

    size: int
    order: str
    offsets: list[int]


ORDERS: dict[str, Callable[[Stay], tuple[int, ...]]] = {
    "size": lambda stay: (-stay.size, stay.start),
    "lifetime": lambda stay: (stay.start - stay.end, -stay.size),
    "area": lambda stay: (-stay.size * (stay.end - stay.start), stay.start),
    "start": lambda stay: (stay.start, -stay.size),
}


def live_peak(stays: Sequence[Stay]) -> int:
    """The most bytes alive at once: no arena is smaller.

    >>> live_peak([Stay(3, 0, 2), Stay(4, 1, 3), Stay(5, 2, 4)])
    9
    """
    changes = [(stay.start, stay.size) for stay in stays] + [(stay.end, -stay.size) for stay in stays]
    now = peak = 0
    for _, change in sorted(changes):
        now += change
        peak = max(peak, now)
    return peak


def first_fit(stays: Sequence[Stay], order: Sequence[int]) -> list[int]:
    """The offset of each stay, placed in that order.

    >>> first_fit([Stay(3, 0, 2), Stay(4, 1, 3), Stay(3, 2, 4)], [0, 1, 2])
    [0, 3, 0]
    """
    offsets = [0] * len(stays)
    placed: list[tuple[int, int, int, int]] = []  # offset, end of it, start and end in time
    for index in order:
        stay, low = stays[index], 0
        for offset, top, start, end in placed:
            if start < stay.end and stay.start < end:
                if offset - low >= stay.size:
                    break
                low = max(low, top)
        offsets[index] = low
        insort(placed, (low, low + stay.size, stay.start, stay.end))
    return offsets


def height(stays: Sequence[Stay], offsets: Sequence[int]) -> int:
    """The bytes of the arena."""
    return max((offset + stay.size for stay, offset in zip(stays, offsets, strict=True)), default=0)


def best_arena(stays: Sequence[Stay], *, moves: int = 20) -> Arena:
    """The smallest arena that was found."""
    bound = live_peak(stays)
    found = []
    for name, key in ORDERS.items():
        order = sorted(range(len(stays)), key=lambda index: key(stays[index]))
        offsets = first_fit(stays, order)
        found.append((height(stays, offsets), name, order, offsets))
        if found[-1][0] == bound:
            break
    size, name, order, offsets = min(found)
    best = Arena(size, name, offsets)
    for _ in range(moves):
        if best.size == bound:
            break
        top = max(range(len(stays)), key=lambda index: offsets[index] + stays[index].size)
        order = [top, *(index for index in order if index != top)]
        offsets = first_fit(stays, order)
        if height(stays, offsets) < best.size:
            best = Arena(height(stays, offsets), name, offsets)
    return best
