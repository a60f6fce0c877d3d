"""Which sketches a budget needs: none where exact recomputation does as well, else as few as will do.

Problem: given inputs that may be sketched, and what the step costs under a budget with some of them sketched,
choose which. Steps are compared by their seconds, or by their peaks where the smallest is asked for.

Method: the exact step is looked at first, then the one with every sketch. The exact one is taken where it
takes no longer than the sketched one, or than the exact step without a cap: a sketch is there for the bytes,
not for its speed. A difference within a margin is none. Otherwise sketches are taken out again, in blocks
that get smaller, those first that are worth least, as long as the step stays within the margin of the one
with every sketch. What a step costs is seen by a quick look (`solve.quick`); only the chosen one is planned
in full.

Limits: at most eight looks, so of many sketches more may stay than are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

from ..graph import Graph
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
    """A way to run the step, and what it costs: under so many bytes, or with as few as it can (None)."""

    step: S
    graph: Graph
    room: int | None

    @cached_property
    def look(self) -> Rung:
        """A plan that was found quickly."""
        return smallest(self.graph) if self.room is None else quick(self.graph, self.room)

    @property
    def fits(self) -> bool:
        """Whether the quick plan keeps to the budget."""
        return self.room is None or self.look.peak <= self.room

    @property
    def cost(self) -> float:
        """What is to be small: the seconds, or the peak where the smallest is asked for."""
        return self.look.peak if self.room is None else self.look.seconds


def decide(able: Sequence[C], draft: Callable[[Sequence[C]], Draft[S]]) -> list[Draft[S]]:
    """The drafts to plan in full, in this order, until one fits; as few of the able are sketched as will do.

    Those come first that are worth least.
    """
    exact = draft(())
    free = 0.0 if exact.room is None else exact.graph.seconds  # what no sketch is needed for
    if not able or (exact.fits and exact.cost <= (1 + MARGIN) * free):
        return [exact]
    every = draft(able)
    if not every.fits:
        return sorted((exact, every), key=lambda draft: draft.look.peak)
    limit = (1 + MARGIN) * max(every.cost, free)

    def does(other: Draft[S]) -> bool:
        return other.fits and other.cost <= limit

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
