r"""The best increasing sequence of lower sets under a budget: a dynamic programme with Pareto labels.

Method: Kusumoto et al. 2019, algorithm 1. With dp[∅] = {(0, 0)}, sets in order of size and W = b(L') \ L:

    for L ⊊ L' and (t, m) in dp[L]:
        if m + 2 (M(L') - M(L)) + tail(L') <= B:  push (t + T(W), m + M(W)) to dp[L']

where t is the time that is kept, m the bytes that are cached, and a label goes when another one keeps as much
in as few bytes. The last segment is not recomputed, so V gets t + T(V \ L). *Time-centric* is the label of V
that keeps the most time. *Memory-centric* is the coarsest sequence: the least time cached, T(U). It caches
little and makes long segments, of which liveness frees more afterwards. The smallest feasible budget is found
by bisection on `least_cached`; each sequence found lowers the upper end to its own peak.

What makes tens of thousands of sets tractable (GoogLeNet's 27 358 have 3·10^8 nested pairs):

- One target at a time, all its sources at once as arrays.
- Far sources (see `tables`) are one pool per cut, sorted by time kept. A label of theirs matters by
  its time, its bytes and m - 2 M(L) alone, so those that another label beats in all three leave the pool;
  and a running minimum over the pool gives a target's Pareto labels without sorting.
- A label that cannot reach V within the budget is not kept, nor one whose cost so far and the lower bound on
  the rest exceed a ceiling (`bounds`). The ceiling starts at the lower bound of the whole and rises
  until a sequence is found; that sequence is then the best one.

Interrupted by ctrl-C, a search closes what it has: every label so far is joined directly to V, and the
sequence with the fewest cached bytes is known from the start.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...plans.patience import check_time
from .bounds import Ends, best_ends, least_cached
from .pareto import NEVER, pareto, staircase, unbeaten
from .tables import Bytes, Seconds, Tables

__all__ = ["Centric", "Found", "best_sequence", "measure", "smallest_budget"]

Centric = Literal["time", "memory"]
Progress = Callable[[float], None]
Index = NDArray[np.int64]

FEW = 256
CEILINGS = (0.03, 0.1, 0.3, 1.0, 3.0)
"""How far above the lower bound a search looks before it looks everywhere, as a share of that bound."""


class Found(NamedTuple):
    """A sequence of lower sets without ∅; its peak, overhead and cached seconds by formula.

    `complete` is False where the search was interrupted.
    """

    sequence: tuple[int, ...]
    bytes: int
    overhead: float
    kept: float
    complete: bool = True


def best_sequence(
    family: Tables, budget: int, *, centric: Centric = "time", progress: Progress | None = None
) -> Found | None:
    """The best sequence of a family under a budget by formula, or None where there is none.

    A KeyboardInterrupt ends the search with the best sequence that is known by then (`complete` is False).
    """
    cost = attrgetter("overhead" if centric == "time" else "kept")
    least = least_cached(family, budget)
    if least.cached[-1] >= NEVER:
        return None
    found = [measure(family, least.sequence(family))]
    search: _Search | None = None
    try:
        bounds = best_ends(family, budget, least, coarse=centric == "memory")
        for ceiling in _ceilings(family, max(bounds.whole(budget), 0.0), cost(found[0])):
            search = _Search(family, budget, centric, bounds, ceiling)
            search.run(progress)
            found += search.close()
            # Nothing cheaper than the ceiling was thrown away, so what was found below it is the best there
            # is.
            if cost(found[-1]) <= ceiling:
                break
    except KeyboardInterrupt:
        found += search.close() if search else []
        return min(found, key=cost)._replace(complete=False)
    return min(found, key=cost)


def _ceilings(family: Tables, lowest: float, known: float) -> list[float]:
    """Costs to look up to, one after the other; no more than what is known to be possible."""
    # From low ceilings up: most labels die early under a low one, and a wasted round costs little.
    step = max(lowest, 0.02 * float(family.seconds[-1]))
    return [*(lowest + step * share for share in CEILINGS if lowest + step * share < known), known]


def smallest_budget(family: Tables, *, tolerance: float = 0.0, progress: Progress | None = None) -> Found:
    """The sequence with the least peak by formula, by bisection; exact unless a relative tolerance is given.

    A KeyboardInterrupt ends the bisection with the best sequence that is known by then.
    """
    best = measure(family, family.sets[-1:])
    low = -1
    try:
        while best.bytes - low > max(1, tolerance * best.bytes):
            middle = (low + best.bytes) // 2
            least = least_cached(family, middle)
            if least.cached[-1] >= NEVER:
                low = middle
            else:
                best = measure(family, least.sequence(family))
            if progress is not None:
                progress(min(1.0, (low + 1) / max(best.bytes, 1)))
    except KeyboardInterrupt:
        return best._replace(complete=False)
    return best


def measure(family: Tables, sequence: tuple[int, ...]) -> Found:
    """What a sequence of sets of a family costs by formula."""
    peak, cached, kept, before, last = 0, 0, 0.0, 0, 0
    for position in map(family.position.__getitem__, sequence):
        peak = max(peak, cached + int(family.span[position] - family.span[last] + family.tail[position]))
        new = family.edges[position] & ~family.sets[last]
        cached += family.dag.total_bytes(new)
        kept += family.dag.total_seconds(new)
        before, last = last, position
    overhead = max(float(family.seconds[before]) - kept, 0.0)
    return Found(sequence, peak, overhead, kept)


class _Pool(NamedTuple):
    """Labels of several sets by falling value: value, bytes cached, m - 2 M(L) and number."""

    value: Seconds
    cached: Bytes
    slack: Bytes
    number: Index

    def pick(self, which: NDArray[np.intp]) -> _Pool:
        return _Pool(self.value[which], self.cached[which], self.slack[which], self.number[which])

    def with_more(self, more: _Pool) -> _Pool:
        return _Pool(
            np.concatenate([self.value, more.value]),
            np.concatenate([self.cached, more.cached]),
            np.concatenate([self.slack, more.slack]),
            np.concatenate([self.number, more.number]),
        )


class _Search:
    """One run of the dynamic programme; labels are numbered in the order they are made.

    A label's value is the time it keeps (or minus that, when the coarsest sequence is looked for). The labels
    of a set lie together, by falling value and falling bytes.
    """

    def __init__(self, family: Tables, budget: int, centric: Centric, bounds: Ends, ceiling: float) -> None:
        self.family, self.most = family, bounds.most
        self.sign = 1.0 if centric == "time" else -1.0
        self.base = family.seconds if centric == "time" else np.zeros_like(family.seconds)
        self.price = bounds.price
        # A hair more, so that rounding never throws the best sequence itself away.
        slack = ceiling + 1e-9 * (float(family.seconds[-1]) + bounds.price * budget)
        self.worst = self.base + bounds.rest - bounds.price * budget - slack
        self.most_slack = budget - family.span - family.tail
        # What no later target can use any more leaves the pool.
        self.later_most_slack = np.maximum.accumulate(self.most_slack[::-1])[::-1]
        self.start = np.zeros(len(family.sets) + 1, dtype=np.int64)
        self.value = np.zeros(1024)
        self.cached, self.where, self.parent = (np.zeros(1024, dtype=np.int64) for _ in range(3))
        self.parent[0] = -1
        self.start[1:] = self.count = 1
        self.cuts = sorted(set(family.far))
        self.last_use = {cut: target for target, cut in enumerate(family.far)}
        self.pools = {0: self._labels(0, 1)}
        self.pooled, self.thinned = 0, FEW

    def run(self, progress: Progress | None) -> None:
        """Make the labels of all sets but V."""
        for target in range(1, len(self.family.sets) - 1):
            check_time()
            if progress is not None and target % 64 == 0:
                progress(target / len(self.family.sets))
            self.start[target] = self.count
            if self.most[target] >= 0:
                self._extend(target)
            self.start[target + 1] = self.count

    def close(self) -> list[Found]:
        """The sequence of the best label joined to V by one last segment, if any fits."""
        labels = self._labels(0, self.count)
        fits = np.flatnonzero(labels.slack <= self.most_slack[-1])
        if not len(fits):
            return []
        value = labels.value[fits] - self.base[self.where[fits]]
        number = int(fits[np.lexsort((labels.cached[fits], -value))[0]])
        sets = [self.family.sets[-1]]
        while self.parent[number] >= 0:
            sets.append(self.family.sets[int(self.where[number])])
            number = int(self.parent[number])
        return [measure(self.family, tuple(reversed(sets)))]

    def _labels(self, start: int, end: int) -> _Pool:
        cached = self.cached[start:end]
        slack = cached - self.family.span[self.where[start:end]]
        return _Pool(self.value[start:end], cached, slack, np.arange(start, end))

    def _extend(self, target: int) -> None:
        """Make the labels of one set from those of its subsets."""
        value, cached, parent = self._from_far(target)
        near = self._from_near(target)
        if len(near[0]):
            value, cached, parent = (
                np.concatenate(pair) for pair in zip((value, cached, parent), near, strict=True)
            )
            best = pareto(value, cached)
            value, cached, parent = value[best], cached[best], parent[best]
        promise = value - self.price * cached
        use = np.flatnonzero((cached <= self.most[target]) & (promise >= self.worst[target]))
        self._add(target, value[use], cached[use], parent[use])

    def _add(self, target: int, value: Seconds, cached: Bytes, parent: Index) -> None:
        end = self.count + len(value)
        while end > len(self.value):
            self.value = np.concatenate([self.value, np.zeros_like(self.value)])
            self.cached = np.concatenate([self.cached, np.zeros_like(self.cached)])
            self.where = np.concatenate([self.where, np.zeros_like(self.where)])
            self.parent = np.concatenate([self.parent, np.zeros_like(self.parent)])
        here = slice(self.count, end)
        self.value[here], self.cached[here] = value, cached
        self.where[here], self.parent[here] = target, parent
        self.count = end

    def _from_far(self, target: int) -> tuple[Seconds, Bytes, Index]:
        """The Pareto labels of all far subsets after which a segment up to the target still fits."""
        pool = self._pool(self.family.far[target], target)
        best = staircase(np.where(pool.slack <= self.most_slack[target], pool.cached, NEVER))
        value = pool.value[best] + self.sign * self.family.edge_seconds[target]
        return value, pool.cached[best] + self.family.edge_bytes[target], pool.number[best]

    def _from_near(self, target: int) -> tuple[Seconds, Bytes, Index]:
        """The labels of the near subsets after which a segment up to the target still fits."""
        near = self.family.near[target]
        first, end = self.start[near.sources], self.start[near.sources + 1]
        gain = self.sign * near.seconds
        some = np.flatnonzero(end > first)
        # The last label of a set has its fewest bytes: where that one does not fit, none of the set does.
        lowest = self.cached[end[some] - 1]
        use = lowest - self.family.span[near.sources[some]] <= self.most_slack[target]
        use &= lowest + near.bytes[some] <= self.most[target]
        promise = self.value[first[some]] + gain[some] - self.price * (lowest + near.bytes[some])
        use &= promise >= self.worst[target]
        some = some[use]
        length = end[some] - first[some]
        pair = np.repeat(some, length)
        # The numbers of all labels of all these sets in one array, without a loop over the sets.
        number = np.arange(len(pair)) + np.repeat(first[some] - np.cumsum(length) + length, length)
        cached = self.cached[number]
        fits = np.flatnonzero(cached - self.family.span[self.where[number]] <= self.most_slack[target])
        pair, number = pair[fits], number[fits]
        return self.value[number] + gain[pair], cached[fits] + near.bytes[pair], number

    def _pool(self, cut: int, target: int) -> _Pool:
        """The labels of all sets up to a cut that matter to this target or a later one."""
        while self.pooled < cut:
            newer = next(later for later in self.cuts if later > self.pooled)
            pool = self._labels(int(self.start[self.pooled + 1]), int(self.start[newer + 1]))
            if len(pool.value) > FEW:
                pool = pool.pick(unbeaten(*pool[:3]))
            pool = self.pools[self.pooled].with_more(pool)
            pool = pool.pick(np.flatnonzero(pool.slack <= self.later_most_slack[target]))
            pool = pool.pick(np.argsort(-pool.value, kind="stable"))
            # Thinning takes longer than adding: only when the pool has doubled since the last time.
            if len(pool.value) > 2 * self.thinned:
                pool = pool.pick(unbeaten(*pool[:3]))
                self.thinned = max(len(pool.value), FEW)
            self.pools = {old: kept for old, kept in self.pools.items() if self.last_use[old] >= target}
            self.pools[newer] = pool
            self.pooled = newer
        return self.pools[cut]
