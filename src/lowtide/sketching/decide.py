"""Which sketches a budget needs: none where exact recomputation does as well, else as few as will do.

Problem: given inputs that may be sketched, and what the step costs under a budget with some of them sketched,
choose which. Steps are compared by their seconds, or by their peaks where the smallest is asked for.

Method: the exact step is looked at first, then the one with every sketch. The exact one is taken where it
takes no longer: a sketch is there for the bytes, so it is the seconds of recomputation that it is to
save, and its shorter products do not count. A difference within a margin is none. Otherwise sketches are
taken out again, in blocks that get smaller, those first that are worth least, as long as the step stays
within the margin of the one with every sketch. What a step costs is seen by a quick look (`solve.quick`);
only the chosen one is planned in full.

Limits: at most eight looks, so of many sketches more may stay than are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

from ..plans.graph import Graph
from ..solve.quick import quick, smallest
from ..solve.search.ladder import Rung

__all__ = ["MARGIN", "Draft", "decide"]

MARGIN = 0.05
"""Prices of ops vary by a few percent from one measurement to the next; less is not worth any noise."""

_TRIES = 6

C = TypeVar("C")
S = TypeVar("S")


@dataclass(eq=False)
class Draft(Generic[S]):
    """A way to run the step, and what it costs: under a byte limit, or with as few bytes as it can (None)."""

    step: S
    graph: Graph
    byte_limit: int | None

    @cached_property
    def look(self) -> Rung:
        """A plan that was found quickly."""
        return smallest(self.graph) if self.byte_limit is None else quick(self.graph, self.byte_limit)

    @property
    def fits(self) -> bool:
        """Whether the quick plan keeps to the budget."""
        return self.byte_limit is None or self.look.peak <= self.byte_limit

    def cost(self, exact: Draft[S]) -> float:
        """What is to be small: the seconds, or the peak where the smallest is asked for.

        Where sketches make products shorter than those of the exact step, that does not count.
        """
        if self.byte_limit is None:
            return self.look.peak
        again = self.look.seconds - self.graph.seconds
        return again + max(self.graph.seconds, exact.graph.seconds)


def decide(able: Sequence[C], draft: Callable[[Sequence[C]], Draft[S]]) -> list[Draft[S]]:
    """The drafts to plan in full, in this order, until one fits; as few of the able are sketched as will do.

    Those come first that are worth least.
    """
    exact = draft(())
    free = (
        exact.byte_limit is not None
        and exact.fits
        and exact.cost(exact) <= (1 + MARGIN) * exact.graph.seconds
    )
    if not able or free:
        return [exact]
    every = draft(able)
    if not every.fits:
        return sorted((exact, every), key=lambda draft: draft.look.peak)
    limit = (1 + MARGIN) * every.cost(exact)

    def does(other: Draft[S]) -> bool:
        return other.fits and other.cost(exact) <= limit

    return [exact, every] if does(exact) else [_fewest(able, every, draft, does), every, exact]


def _fewest(
    able: Sequence[C],
    every: Draft[S],
    draft: Callable[[Sequence[C]], Draft[S]],
    does: Callable[[Draft[S]], bool],
) -> Draft[S]:
    """Take some out, a block at a time, in smaller blocks where one must stay, while there are tries."""
    best, kept = every, list(range(len(able)))
    refused: set[tuple[int, ...]] = {()}  # which is the exact step
    at, block, tries = 0, max(1, len(kept) // 2), 0
    while at < len(kept) and tries < _TRIES:
        rest = (*kept[:at], *kept[at + block :])
        if rest not in refused:
            tries += 1
            found = draft([able[index] for index in rest])
            if does(found):
                best, kept = found, list(rest)
                continue
            refused.add(rest)
        if block > 1:
            block //= 2
        else:
            at += 1
    return best
