"""What users get: the fastest plan that is found under a budget.

Problem: given a graph and a budget, choose what runs again and when, for the least extra time.

Method: a *ladder* of plans that does not depend on the budget. On the way down, targets between the peak of
keeping everything and what the largest single run needs are each planned for by greedy descents (see
`greedy`), which go on from the plan for the target before or, every few targets, start afresh with several
weights of bytes against seconds. Where none reaches its target, bisection looks for the smallest
peak that can be reached, going on from the smallest plan so far and from the best segments (see
`sqrt_segments`). On the way up the room between the targets is filled by taking repeated runs away. Every
plan is kept unless another one is both smaller and faster.

`auto` returns the fastest plan of the ladder that fits. So a larger budget never gives a slower plan, and
what a budget of 0 reaches fits every budget above it. The ladders of the last few graphs are remembered:
asking again with another budget takes no time.

Complexity: some forty descents for small graphs, about ten for large ones (see `EFFORTS`).

Limits: a local search, with no bound on the distance to the optimum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from ..graph import Graph
from ..schedule import Schedule
from .greedy import descend, prune
from .keep_all import keep_all
from .order import first_order
from .sqrt_segments import segment_orders
from .tape import Facts, Tape

__all__ = ["auto"]


@dataclass(frozen=True)
class Effort:
    """How much to search.

    There are `targets` on the way down, every `afresh`-th of them is also planned for from keeping
    everything, once per exponent; then come `bisections`, and `fine` steps on the way up. `tolerance` is
    that of `descend`.
    """

    targets: int
    afresh: int
    exponents: tuple[float, ...]
    tolerance: float = 0.25
    bisections: int = 4
    fine: int = 48


EFFORTS = (
    (500, Effort(24, 2, (1.4, 1.0, 0.7), tolerance=0.1)),
    (1000, Effort(18, 6, (1.4, 1.0))),
    (2000, Effort(16, 4, (1.4,))),
    (4000, Effort(8, 4, (1.4,), bisections=2, fine=24)),
)
"""The effort for graphs of up to so many ops."""

LEAST_EFFORT = Effort(5, 5, (1.4,), bisections=1, fine=12)


@dataclass(frozen=True)
class Rung:
    """A plan of the ladder."""

    peak: int
    seconds: float
    order: tuple[int, ...] = field(compare=False)


def auto(graph: Graph, budget: int) -> Schedule:
    """The fastest plan found under the budget, or the one with the smallest peak when none fits."""
    facts = Facts(graph)
    base = facts.order(*first_order(graph))
    if Tape(facts, base).peak() <= budget:
        return keep_all(graph)
    rungs = _ladder(graph)
    fitting = [rung for rung in rungs if rung.peak <= budget]
    best = min(fitting, key=lambda rung: rung.seconds) if fitting else rungs[0]
    return facts.schedule(best.order)


@lru_cache(maxsize=4)
def _ladder(graph: Graph) -> tuple[Rung, ...]:
    """The undominated plans of a graph, smallest peak first."""
    climb = _Climb(graph)
    climb.down()
    climb.bisect()
    climb.up()
    ladder: list[Rung] = []
    for rung in sorted(climb.rungs, key=lambda rung: (rung.peak, rung.seconds)):
        if not ladder or rung.seconds < ladder[-1].seconds:
            ladder.append(rung)
    return tuple(ladder)


class _Climb:
    """The search for a ladder: `rungs` is every plan seen so far."""

    def __init__(self, graph: Graph) -> None:
        self.facts = Facts(graph)
        self.base = self.facts.order(*first_order(graph))
        self.effort = next((e for ops, e in EFFORTS if len(graph.ops) <= ops), LEAST_EFFORT)
        self.rungs = [_rung(Tape(self.facts, self.base))]
        self.top, self.failed = self.rungs[0].peak, self.facts.floor(self.base)
        orders = [self.facts.order(*order) for order in segment_orders(graph)]
        segments = [_rung(Tape(self.facts, order)) for order in orders]
        self.rungs += segments
        self.segments = min(segments, key=lambda rung: (rung.peak, rung.seconds))

    def down(self) -> None:
        """Plan for each target in turn, until one is out of reach; the steps get finer towards the floor."""
        floor, steps, afresh = self.failed, self.effort.targets, True
        last: Sequence[int] = self.base
        for step in range(1, steps):
            target = floor + int((self.top - floor) * (1 - step / steps) ** 1.2)
            reached = [self.attempt(last, self.effort.exponents[0], target)]
            if afresh and step % self.effort.afresh == 0:
                fresh = [self.attempt(self.base, exponent, target) for exponent in self.effort.exponents]
                afresh = any(rung.peak <= target for rung in fresh)
                reached += fresh
            fitting = [rung for rung in reached if rung.peak <= target]
            if not fitting:
                self.failed = target
                return
            last = min(fitting, key=lambda rung: (rung.seconds, rung.peak)).order

    def least(self) -> Rung:
        """The plan with the smallest peak so far."""
        return min(self.rungs, key=lambda rung: (rung.peak, rung.seconds))

    def bisect(self) -> None:
        """Look for the smallest peak between the last target reached and the first one missed."""
        self.attempt(self.segments.order, self.effort.exponents[0], (self.least().peak + self.failed) // 2)
        for _ in range(self.effort.bisections):
            least = self.least()
            target = (least.peak + self.failed) // 2
            if target >= least.peak:
                return
            if self.attempt(least.order, self.effort.exponents[0], target).peak > target:
                self.failed = max(target, self.failed)

    def up(self) -> None:
        """Fill the ladder between the targets: let go of what is run again as the room grows."""
        self.rungs.sort(key=lambda rung: (rung.peak, rung.seconds))
        found, known = Tape(self.facts, self.rungs[0].order), list(self.rungs)
        low, high = self.rungs[0].peak, self.top
        for step in range(1, self.effort.fine):
            target = low + (high - low) * step // self.effort.fine
            prune(found, target)
            best = min((rung for rung in known if rung.peak <= target), key=lambda rung: rung.seconds)
            if best.seconds < found.seconds:
                found = Tape(self.facts, best.order)
                prune(found, target)
            self.rungs.append(_rung(found))

    def attempt(self, order: Sequence[int], exponent: float, target: int) -> Rung:
        """One descent from an order of runs to a target, cleaned up."""
        tape = Tape(self.facts, order)
        descend(tape, target, exponent=exponent, tolerance=self.effort.tolerance)
        prune(tape, max(target, tape.peak()))
        rung = _rung(tape)
        self.rungs.append(rung)
        return rung


def _rung(tape: Tape) -> Rung:
    order = tape.order()
    seconds = sum(tape.facts.seconds[op] for op in order)
    return Rung(tape.peak(), seconds, tuple(order))
