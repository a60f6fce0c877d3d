"""A graph as a sequence of about equal steps, cut in several ways, and its orders of runs for any slots.

Problem: the actions of `actions.py` are for equal steps; the steps of a captured graph are what one
makes of it, and neither equal seconds, equal bytes nor few crossing bytes is best for every graph and budget.

Method: start from the cuts of `stages`. Make steps of about equal seconds or of about equal bytes, each
cut where the fewest bytes cross nearby, or take the cheapest cuts of all; each in several numbers. Merging
stages needs no second look at the graph: a run of the backward belongs to the earliest stage that it reads
from, so the backward of a merged step is that of its stages, from the last to the first.

Complexity: O(ops) per cut, O(runs) per order.

Limits: the numbers of steps are in geometric progression, fewer for larger graphs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TypeAlias

from ..chain_stages import Action, Stages
from .actions import Backward, Forward, actions
from .table import Keep, forward_count

__all__ = ["Order", "Steps", "all_steps"]

MOST_RUNS = 1 << 18
"""The runs of the longest order that is tried."""

MIXED_STEPS, MIXED_HELD = 160, 16
"""The most steps and the most slots per state for which "mixed" is tried: its table grows with their cube."""

Order: TypeAlias = tuple[list[str], list[str]]


@dataclass(frozen=True)
class Steps:
    """A graph cut into steps, what a slot keeps, and how many slots the internal state of a step takes."""

    stages: Stages
    keep: Keep
    internal: int
    held: int

    @property
    def most_slots(self) -> int:
        """The slots with which everything is kept that may be."""
        return len(self.stages) * (self.internal if self.keep == "mixed" else 1)

    @property
    def least_slots(self) -> int:
        """The fewest slots with which an order is not too long."""
        return self.slots_for(MOST_RUNS)

    def slots_for(self, runs: int) -> int:
        """About the fewest slots with which an order has at most `runs` runs."""
        slots = 1
        while slots < self.most_slots and self.runs(slots) > runs:
            slots += slots // 2 + 1
        return min(slots, self.most_slots)

    def runs(self, slots: int) -> int:
        """About how many ops run in the order with `slots` slots."""
        keep: Keep = "internal" if self.keep == "internal" else "hidden"
        count = forward_count(len(self.stages), slots, keep=keep)
        return len(self.stages.graph.ops) + count * sum(map(len, self.stages.forward)) // len(self.stages)

    def order(self, slots: int) -> Order:
        """The order of runs with `slots` slots."""
        return self.stages.order(self._actions(slots))

    def orders(self, runs: int) -> Iterator[Order]:
        """Orders of about `runs` runs in all: every number of slots, or several in geometric progression."""
        count = runs // self.runs(self.most_slots)
        for slots in _several(self.slots_for(runs // 3), self.most_slots - 1, count):
            if runs > 0:
                runs -= self.runs(slots)
                yield self.order(slots)

    def _actions(self, slots: int) -> Iterator[Action]:
        """The actions on stages; the first run of each is not one of them."""
        steps, backward = len(self.stages), False
        for action in actions(steps, slots, keep=self.keep, internal=self.internal, held=self.held):
            if isinstance(action, Backward):
                backward = True
                yield "backward", action.step
            elif isinstance(action, Forward) and backward:
                for step in range(action.start, action.stop):
                    yield "forward", step


def all_steps(fine: Stages, keep: Keep) -> list[Steps]:
    """A graph cut in several ways, the finest first."""
    made = [_merge(fine, cuts, keep) for cuts in _cuts(fine)]
    return made if keep != "mixed" else [steps for steps in made if len(steps.stages) <= MIXED_STEPS]


def _merge(fine: Stages, cuts: Sequence[int], keep: Keep) -> Steps:
    bounds = list(pairwise([0, *cuts, len(fine)]))
    stages = Stages(
        fine.graph,
        tuple(tuple(name for stage in fine.forward[i:j] for name in stage) for i, j in bounds),
        tuple(tuple(name for stage in reversed(fine.backward[i:j]) for name in stage) for i, j in bounds),
        (*(fine.crossing[start] for start, _ in bounds), fine.crossing[-1]),
    )
    held = min(max(round(sum(stages.saved) / max(sum(stages.crossing), 1)), 1), MIXED_HELD)
    return Steps(stages, keep, held + 1, held)


def _cuts(fine: Stages) -> list[tuple[int, ...]]:
    """Sets of cuts, the finest first, in several numbers and made in three ways."""
    most = len(fine)
    ops = [float(len(stage)) for stage in fine.forward]
    seconds = list(fine.forward_seconds) if any(fine.forward_seconds) else ops
    saved = [float(size) for size in fine.saved] if any(fine.saved) else ops
    cheapest = sorted(range(1, most), key=lambda cut: (fine.crossing[cut], cut))
    found: dict[tuple[int, ...], None] = {tuple(range(1, most)): None}
    for count in reversed(_several(2, most - 1, _variety(fine))):
        found.setdefault(tuple(sorted(cheapest[: count - 1])))
        for weights in (seconds, saved):
            found.setdefault(tuple(_even(weights, fine.crossing, count)))
    return [cuts for cuts in found if cuts] or [()]


def _variety(fine: Stages) -> int:
    """How many numbers of steps are tried."""
    return min(max(12_000 // max(len(fine.graph.ops), 1), 4), 32)


def _even(weights: Sequence[float], crossing: Sequence[int], count: int) -> Iterator[int]:
    """Cuts into steps of about equal weight, each the cheapest of its neighbourhood."""
    place = list(accumulate(weights, initial=0.0))
    width = place[-1] / count
    cut = 1
    for part in range(1, count):
        goal = width * part
        near: list[int] = []
        while cut < len(weights) and place[cut] < goal + width / 2:
            near += [cut] if place[cut] >= goal - width / 2 else []
            cut += 1
        if near:
            yield min(near, key=lambda cut: (crossing[cut], abs(place[cut] - goal)))


def _several(low: int, high: int, count: int) -> list[int]:
    """About `count` whole numbers from low to high, denser at the low end; none where there are none."""
    if count > high - low:
        return list(range(low, high + 1))
    parts = max(count - 1, 1)
    return sorted({round(low * (high / low) ** (part / parts)) for part in range(parts + 1)})
