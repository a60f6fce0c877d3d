"""The algorithms behind `chain`: the recurrences of Hong et al. (2025), which `chain` states."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np

from .laws import Law

__all__ = ["least_total", "linear", "long_end", "quadratic", "swept_peak", "walk"]


def least_total(sizes: Sequence[int]) -> tuple[int, tuple[int, ...]]:
    """Objective "total": halve the range of bounds until none is left that can be better or as good."""
    sums = list(accumulate(sizes))
    differences = np.subtract.outer(np.array(sums), np.array(sums))
    bounds: list[int] = np.unique(differences[differences >= 0]).tolist()
    kept: dict[int, int] = {}
    best = (sums[-1] + 1, 0)
    ranges = [(0, len(bounds) - 1)]
    while ranges:
        low, high = ranges.pop()
        for place in {low, high} - kept.keys():
            kept[place] = _bounded(sizes, sums, bounds[place])[0]
            best = min(best, (kept[place] + bounds[place], bounds[place]))
        # What is kept never rises with the bound, so this is the least that any bound in between could give.
        if high - low > 1 and (bounds[low + 1] + kept[high], bounds[low + 1]) < best:
            middle = (low + high) // 2
            ranges += [(low, middle), (middle, high)]
    peak, bound = best
    return peak, _bounded(sizes, sums, bound)[1]


def _bounded(sizes: Sequence[int], sums: Sequence[int], bound: int) -> tuple[int, tuple[int, ...]]:
    """The fewest bytes to keep so that no interior is above the bound, and what is kept; O(n)."""
    least = [sizes[0]]
    before = [0]
    queue = deque([0])  # least grows from front to back
    for j in range(1, len(sizes)):
        while sums[j - 1] - sums[queue[0]] > bound:
            queue.popleft()
        before.append(queue[0])
        least.append(sizes[j] + least[queue[0]])
        while queue and least[queue[-1]] >= least[j]:
            queue.pop()
        queue.append(j)
    kept = [len(sizes) - 1]
    while kept[-1]:
        kept.append(before[kept[-1]])
    return least[-1], tuple(reversed(kept))


def quadratic(sizes: Sequence[int], law: Law) -> list[int]:
    """M for any law."""
    least = [0] * (len(sizes) - 1) + [sizes[-1]]
    for i in range(len(sizes) - 2, -1, -1):
        least[i] = sizes[i] + min(map(max, least[i + 1 :], law.row(i)))
    return least


def linear(sizes: Sequence[int], law: Law) -> list[int]:
    """M for a monotone law."""
    upper = law.sweep()
    least = [0] * (len(sizes) - 1) + [sizes[-1]]
    queue: deque[int] = deque()
    for i in range(len(sizes) - 2, -1, -1):
        # A nearer checkpoint that is no dearer is better than a farther one: its segment is shorter.
        while queue and least[queue[0]] >= least[i + 1]:
            queue.popleft()
        queue.appendleft(i + 1)
        needed = upper(i, queue[-1])
        while len(queue) > 1 and least[queue[-2]] <= needed:
            queue.pop()
            needed = upper(i, queue[-1])
        least[i] = sizes[i] + max(least[queue[-1]], needed)
    return least


def walk(sizes: Sequence[int], least: Sequence[int], budget: int, fits: Law | None) -> tuple[int, ...]:
    """Keep the nearest next output that leaves a way under the budget; O(n) when no law has to be asked.

    Under a monotone law some later output leaves a way too, and the nearer one needs no more than that.
    """
    kept = [0]
    left = budget - sizes[0]
    while kept[-1] < len(sizes) - 1:
        i = kept[-1]
        row = fits.row(i) if fits else None
        later = range(i + 1, len(sizes))
        kept.append(next(j for j in later if least[j] <= left and (row is None or row[j - i - 1] <= left)))
        left -= sizes[kept[-1]]
    return tuple(kept)


def long_end(sizes: Sequence[int], law: Law, budget: int) -> tuple[int, ...]:
    """The kept outputs under a budget with the longest last segment, for a budget that can be met; O(n²).

    The last segment need not be recomputed where its backward comes first: then this recomputes least. The
    fewest bytes kept up to j, c(j) = d_j + min { c(i) : c(i) + U(i, j) <= budget }, say which ends are open.
    """
    last = len(sizes) - 1
    least = [sizes[0]] + [budget + 1] * last
    before = [0] * len(sizes)
    for i in range(last):
        if least[i] > budget:
            continue
        row = law.row(i)
        # The first i from which the rest fits as one last segment: the longest there is.
        if least[i] + row[-1] <= budget:
            before[last] = i
            break
        for j in range(i + 1, last):
            if least[i] + row[j - i - 1] <= budget and least[i] + sizes[j] < least[j]:
                least[j], before[j] = least[i] + sizes[j], i
    kept = [last] if last else []
    while kept and kept[-1]:
        kept.append(before[kept[-1]])
    return tuple(reversed(kept)) or (0,)


def swept_peak(sizes: Sequence[int], indices: Sequence[int], law: Law) -> int:
    """The peak of keeping these outputs, by a law."""
    held = list(accumulate(sizes[i] for i in indices))
    needs = [before + law(i, j) for before, (i, j) in zip(held, pairwise(indices), strict=False)]
    return max([*needs, held[-1]])
