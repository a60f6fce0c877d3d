r"""Bounds on sequences of lower sets under one budget, one number per set instead of Pareto labels.

- `least[j]`: the fewest cached bytes with which set j can be reached, by one pass over the sets in order of
  size. Where V fits after some least label, the budget is feasible.
- `most[j]`: the most cached bytes with which V can still be reached from set j, by one pass from V down:
  most[L] = max over L' ⊋ L of min( B - 2 (M(L') - M(L)) - tail(L'), most[L'] - M(b(L') \ L) ).
- `rest[j]`: for a price per byte, the least of cost + price · (bytes cached from set j on + twice the last
  segment), where only `least` bytes are cached at each set; the same pass. All bytes cached and twice the
  last segment are at most B, so from a label with m bytes the cost to come is at least
  rest[j] - price · (B - m): a Lagrangian bound, valid at any price.

O(near pairs + sets²), all in arrays; the square is over far pairs, whose bytes do not depend on the source.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...plans.patience import check_time
from .pareto import NEVER, staircase, unbeaten
from .tables import Bytes, Seconds, Tables

__all__ = ["Ends", "Least", "best_ends", "ends", "least_cached"]

DOUBLINGS = 8


@dataclass(frozen=True)
class Least:
    """The fewest cached bytes at each set (`NEVER` where it cannot be reached) and where they come from."""

    cached: Bytes
    parent: NDArray[np.int64]

    def sequence(self, family: Tables) -> tuple[int, ...]:
        """The sets on the way to V, ∅ left out."""
        sets: list[int] = []
        last = len(self.parent) - 1
        while last > 0:
            sets.append(family.sets[last])
            last = int(self.parent[last])
        return tuple(reversed(sets))


@dataclass(frozen=True)
class Ends:
    """Bounds from each set to V: the most cached bytes, and the least of cost plus priced bytes."""

    most: Bytes
    rest: Seconds
    price: float

    def whole(self, budget: int) -> float:
        """The lower bound on the cost of any sequence within the budget."""
        return float(self.rest[0]) - self.price * budget


def least_cached(family: Tables, budget: int) -> Least:
    """The fewest bytes that can be cached at each set; V is reached where `cached[-1]` is not `NEVER`."""
    count = len(family.sets)
    cached = np.full(count, NEVER, dtype=np.int64)
    slack = np.full(count, NEVER, dtype=np.int64)
    parent = np.full(count, -1, dtype=np.int64)
    most_slack = budget - family.span - family.tail
    pools = _Pools(family)
    cached[0] = slack[0] = 0
    for target in range(1, count):
        check_time()
        best, source = pools.query(family.far[target], most_slack[target], cached, slack)
        best += int(family.edge_bytes[target])
        near = family.near[target]
        if len(near.sources):
            fits = slack[near.sources] <= most_slack[target]
            reached = np.where(fits, cached[near.sources] + near.bytes, NEVER)
            at = int(reached.argmin())
            if reached[at] < best:
                best, source = int(reached[at]), int(near.sources[at])
        if best < NEVER:
            cached[target], parent[target] = best, source
            slack[target] = best - family.span[target]
    return Least(cached, parent)


class _Pools:
    """For each cut, the sets up to it by rising slack, each with fewer cached bytes than all before it."""

    def __init__(self, family: Tables) -> None:
        self.cuts = sorted(set(family.far))
        self.built = 0
        self.members: list[NDArray[np.intp]] = []
        self.place = {cut: place for place, cut in enumerate(self.cuts)}

    def query(self, cut: int, most_slack: int, cached: Bytes, slack: Bytes) -> tuple[int, int]:
        """The fewest cached bytes of a set up to a cut whose slack is within a limit, and that set."""
        while len(self.members) <= self.place[cut]:
            self._build(cached, slack)
        pool = self.members[self.place[cut]]
        at = int(np.searchsorted(slack[pool], most_slack, side="right")) - 1
        return (int(cached[pool[at]]), int(pool[at])) if at >= 0 else (NEVER, -1)

    def _build(self, cached: Bytes, slack: Bytes) -> None:
        older = self.members[-1] if self.members else np.zeros(0, dtype=np.intp)
        end = self.cuts[len(self.members)] + 1
        new = np.concatenate([older, np.arange(self.built, end)])
        order = new[np.lexsort((cached[new], slack[new]))]
        self.members.append(order[staircase(cached[order])])
        self.built = end


def ends(family: Tables, budget: int, least: Least, *, coarse: bool, price: float) -> Ends:
    """The bounds from each set to V; the cost is recomputation, or time cached where `coarse` is asked."""
    sweep = _Sweep(family, budget, least, coarse, price)
    for target in range(len(family.sets) - 2, -1, -1):
        check_time()
        sweep.leap(target)
        sweep.step(target)
    return Ends(sweep.most, sweep.rest, price)


class _Sweep:
    """The pass from V down. When a set is its turn, everything that contains it has had its own."""

    def __init__(self, family: Tables, budget: int, least: Least, coarse: bool, price: float) -> None:
        self.family, self.least, self.price = family, least.cached, price
        self.span = family.span
        self.most_slack = budget - self.span - family.tail
        self.base = np.zeros_like(family.seconds) if coarse else family.seconds
        self.sign = 1.0 if coarse else -1.0
        closing = self.most_slack[-1] + self.span
        closes = self.least <= closing
        self.most = np.where(closes, closing, -1)
        self.rest = np.where(closes, price * (self.span[-1] - self.span), np.inf)
        cuts = sorted(set(family.far))
        self.group = {cut: before + 1 for before, cut in zip([-1, *cuts[:-1]], cuts, strict=True)}
        self.waiting: dict[int, list[int]] = {cut: [] for cut in cuts}
        self.pool = np.zeros(0, dtype=np.intp)
        self.thinned = 256

    def step(self, target: int) -> None:
        """Improve the near subsets of a set by going there next; leave the far ones for later."""
        if self.most[target] < self.least[target]:
            return
        near = self.family.near[target]
        self.waiting[self.family.far[target]].append(target)
        if len(near.sources):
            limit = self.most[target] - near.bytes
            cost = self.base[target] + self.rest[target] + self.sign * near.seconds + self.price * near.bytes
            limit = np.minimum(limit, self.most_slack[target] + self.span[near.sources])
            self._improve(near.sources, limit, cost - self.base[near.sources])

    def leap(self, cut: int) -> None:
        """Improve all sets between two cuts by going to a far target next."""
        if cut not in self.group:
            return
        self._widen(np.array(self.waiting[cut], dtype=np.intp))
        limits, costs = self._leaps(self.pool)
        for start in range(self.group[cut], cut + 1, 512):
            sources = np.arange(start, min(start + 512, cut + 1))
            limit = np.minimum(self.most_slack[self.pool] + self.span[sources, None], limits)
            cost = np.where(limit >= self.least[sources, None], costs, np.inf)
            best = cost.min(axis=1, initial=np.inf) - self.base[sources]
            self._improve(sources, limit.max(axis=1, initial=-1), best)

    def _leaps(self, targets: NDArray[np.intp]) -> tuple[Bytes, Seconds]:
        """The most bytes and the least cost with which far targets can be gone to."""
        new_bytes, new_seconds = self.family.edge_bytes[targets], self.family.edge_seconds[targets]
        cost = self.base[targets] + self.rest[targets] + self.sign * new_seconds + self.price * new_bytes
        return self.most[targets] - new_bytes, cost

    def _widen(self, targets: NDArray[np.intp]) -> None:
        """Take more far targets into the pool, and throw beaten ones out when it has doubled."""
        self.pool = np.concatenate([self.pool, targets])
        if len(self.pool) > 2 * self.thinned:
            limits, costs = self._leaps(self.pool)
            self.pool = self.pool[unbeaten(-costs, -limits, -self.most_slack[self.pool])]
            self.thinned = max(len(self.pool), 256)

    def _improve(self, sources: NDArray[np.integer], limit: Bytes, cost: Seconds) -> None:
        possible = limit >= self.least[sources]
        at = sources[possible]
        self.most[at] = np.maximum(self.most[at], limit[possible])
        self.rest[at] = np.minimum(self.rest[at], cost[possible])


def best_ends(family: Tables, budget: int, least: Least, *, coarse: bool) -> Ends:
    """The bounds at the price, among a few, at which the bound on the whole is highest.

    The bound is concave in the price. The coarsest sequence caches little, so its bytes need no price.
    """

    def at(price: float) -> Ends:
        return ends(family, budget, least, coarse=coarse, price=price)

    if coarse:
        return at(0.0)
    best = at(0.5 * float(family.seconds[-1]) / max(int(family.span[-1]), 1))
    for factor in (2.0, 0.5):
        # A high price drowns the cost in rounding errors, so there is a last one.
        for _ in range(DOUBLINGS):
            other = at(best.price * factor)
            if other.whole(budget) <= 1.002 * max(best.whole(budget), 0.0):
                break
            best = other
    return best
