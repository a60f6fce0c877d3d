"""Which sketches a budget needs: none where exact recomputation does as well, else as few as will do.

Problem: given inputs that may be sketched, and a planner that makes the best plan of the step with some of
them sketched, choose which. Two plans are compared by their predicted seconds, or by their peaks where the
smallest is asked for.

Method: the exact step is planned first, then the one with every sketch. The exact one is taken where it takes
no longer than the sketched one, or than the exact step without a cap: a sketch is there for the bytes, not
for its speed. A difference within a margin is none. Otherwise sketches are taken out again, in blocks that
get smaller, those first that save least for their noise, as long as the plan stays within the margin of the
one with every sketch. A step that would take too long even if it ran each op once is not planned.

Limits: at most six plans, so of many sketches more may stay than are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Generic, TypeVar

from ..errors import BudgetTooSmall
from ..plan import Plan

__all__ = ["MARGIN", "Draft", "decide"]

MARGIN = 0.05
"""Prices of ops vary by a few percent from one measurement to the next; less is not worth any noise."""

_TRIES = 4

C = TypeVar("C")
S = TypeVar("S")


class Draft(Generic[S]):
    """A way to run the step, the seconds of running each op once, and its plan, made when it is read."""

    def __init__(self, step: S, once: float, make_plan: Callable[[], Plan]) -> None:
        self.step, self.once, self.make_plan = step, once, make_plan

    @cached_property
    def found(self) -> Plan | BudgetTooSmall:
        """The plan, or why there is none."""
        try:
            return self.make_plan()
        except BudgetTooSmall as error:
            return error

    @property
    def fits(self) -> bool:
        """Whether there is a plan."""
        return not isinstance(self.found, BudgetTooSmall)

    @property
    def plan(self) -> Plan:
        """The plan; raises `BudgetTooSmall` where there is none."""
        if isinstance(self.found, BudgetTooSmall):
            raise self.found
        return self.found


def decide(
    able: Sequence[C], draft: Callable[[Sequence[C]], Draft[S]], *, smallest: bool = False
) -> Draft[S]:
    """The draft to run, with as few of the able sketched as will do; raises `BudgetTooSmall` where none fits.

    Those come first that are worth least. `smallest` compares peaks in place of seconds.
    """
    exact = draft(())
    if not able or (exact.fits and not smallest and exact.plan.extra <= MARGIN):
        return exact
    every = draft(able)
    if exact.fits and not smallest and exact.plan.seconds <= (1 + MARGIN) * every.once:
        return exact
    if not every.fits:
        return min(exact, every, key=_least)

    def does(other: Draft[S]) -> bool:
        if smallest:
            return other.plan.peak <= (1 + MARGIN) * every.plan.peak
        limit = (1 + MARGIN) * max(every.plan.seconds, exact.once)
        return other.once <= limit and other.fits and other.plan.seconds <= limit

    return exact if does(exact) else _fewest(able, every, draft, does)


def _least(draft: Draft[S]) -> int:
    """The smallest peak of a draft that does not fit; 0 of one that does."""
    return draft.found.smallest if isinstance(draft.found, BudgetTooSmall) else 0


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
