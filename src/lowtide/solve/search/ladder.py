"""The undominated plans of a graph that a search has found so far.

Each *rung* is an order of runs with its peak and its seconds. A plan is kept unless another one is both as
small and as fast, so that the fastest rung under a budget is the last one that fits, and a larger budget
never gets a slower plan. Rungs are sorted by peak; adding one takes O(rungs).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

__all__ = ["Ladder", "Rung"]


@dataclass(frozen=True)
class Rung:
    """A plan: its order of runs, by the numbers of `tape.Facts`, and what that takes."""

    peak: int
    seconds: float
    order: npt.NDArray[np.int32] = field(compare=False, repr=False)


class Ladder:
    """Rungs by rising peak and falling seconds."""

    def __init__(self, rungs: Iterable[Rung] = ()) -> None:
        """The rungs that are given are a ladder already."""
        self.rungs = [*rungs]
        self.peaks = [rung.peak for rung in self.rungs]
        # The moment at which the search was ended before it was done, where it was.
        self.cut = 0.0

    def __len__(self) -> int:
        return len(self.rungs)

    def __iter__(self) -> Iterator[Rung]:
        return iter(self.rungs)

    def __getitem__(self, index: int) -> Rung:
        return self.rungs[index]

    def improves(self, peak: int, seconds: float) -> bool:
        """Whether no plan so far is as small and as fast."""
        best = self.best(peak)
        return best is None or seconds < best.seconds

    def add(self, rung: Rung) -> None:
        """Keep a plan that improves on those so far, and let go of those it improves on."""
        if not self.improves(rung.peak, rung.seconds):
            return
        # The new rung beats those that are neither smaller nor faster.
        kept = [other for other in self.rungs if other.peak < rung.peak or other.seconds < rung.seconds]
        index = bisect_right([other.peak for other in kept], rung.peak)
        self.rungs = [*kept[:index], rung, *kept[index:]]
        self.peaks = [other.peak for other in self.rungs]

    def best(self, budget: int) -> Rung | None:
        """The fastest plan under a budget."""
        index = bisect_right(self.peaks, budget)
        return self.rungs[index - 1] if index else None

    def best_or_smallest(self, budget: int) -> Rung:
        """The fastest plan under a budget, or the smallest one where none is."""
        return self.best(budget) or self.rungs[0]

    def above(self, budget: int) -> list[Rung]:
        """The plans that are larger than a budget, the smallest first."""
        return self.rungs[bisect_right(self.peaks, budget) :]
