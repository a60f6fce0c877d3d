"""Lower sets: one recomputation on any graph.

Problem: choose which intermediates of a forward to keep, when the forward is a graph and not a chain.

Method: Kusumoto, Inoue, Watanabe, Akiba, Koyama, "A Graph Theoretic Framework of Recomputation Algorithms for
Memory-Efficient Backpropagation" (2019). An increasing sequence of lower sets cuts the forward into segments;
what crosses a cut is cached, all else of a segment is dropped and recomputed right before the backward first
needs something of it. (An op with several outputs may have one that crosses and a large one that only the
backward reads, as max pooling has; each sequence is tried with the latter kept and with it dropped.)

Beside this file: the listing of lower sets and the paper's formulas in `family`, the search over sequences on
plain numbers in `search`, the graph of intermediates of a captured step in `contraction`, the order of runs
of a sequence in `runs`.

On a captured graph the formula only proposes: it counts gradients as large as activations and knows neither
workspaces nor what the backward really reads. So sequences are searched at several budgets of the formula,
from its smallest feasible one up, time-centric and memory-centric, with a segment's bytes counted twice as in
the paper and once, since liveness frees most gradients at once; each sequence becomes an order of runs,
liveness moves every drop up to its value's last use, and the simulator judges. Around the best one more
budgets of the formula are tried.

Families: "approximate" looks at the ancestors of each node; "exact" at all lower sets. Where there are more
than `limit` of those, it looks at the approximate family and the lower sets that do not end inside a run of
nodes between forks and joins; where those are too many as well, at the approximate family alone.

Complexity: O(sets²) in arrays per budget of the formula, at most 2 · `BUDGETS` + 2 · `ROUNDS` budgets, and
one simulation per sequence: seconds for a thousand forward ops. Tens of thousands of lower sets take tens of
seconds per budget, so families of more than `LARGE` sets try a few only.

Limits: one level of recomputation: everything runs at most twice. Pinned ops and what the backward list runs
for the first time run once. Interrupted by ctrl-C, it returns the best schedule found so far.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Literal

from ...errors import LowtideError
from ...plans.graph import Graph
from ...plans.keep_all import keep_all
from ...plans.order import first_order, with_drops
from ...plans.schedule import Schedule
from ...plans.simulator import simulate
from ..best import rank
from ..segments import backward_with_segments
from .contraction import Contraction, contract
from .family import TooManyLowerSets, all_lower_sets, ancestor_closures, members
from .runs import Order, dropped_values, only_for_backward
from .search import Centric, Found, best_sequence, smallest_budget
from .tables import tables

__all__ = ["lower_set_orders", "lower_sets"]

Family = Literal["exact", "approximate"]
Progress = Callable[[float], None]

BUDGETS = 7
ROUNDS = 4
LARGE = 3_000
LIMIT = 1_000
TIMES = (2, 1)
"""How often the formula counts a segment's bytes."""

Formula = tuple[int, int]
"""How often a segment's bytes are counted, and the budget."""


def lower_sets(
    graph: Graph,
    budget: int,
    *,
    family: Family = "exact",
    centric: Centric | Literal["both"] = "both",
    limit: int = LIMIT,
    progress: Progress | None = None,
) -> Schedule:
    """The fastest schedule found under the budget, or the one with the smallest peak when none fits.

    A KeyboardInterrupt, also one that `progress` raises, ends the search with the best found so far.
    """
    best = _Best(graph, budget)
    if best.timeline.peak <= budget:
        return best.schedule
    try:
        search = _Proposals(graph, family, _centrics(centric), limit, progress)
        for order, formula in search.grid(BUDGETS):
            best.look_at(order, formula)
        for _ in range(search.rounds):
            for order, formula in search.around(best.formula):
                best.look_at(order, formula)
    except KeyboardInterrupt:
        pass
    return best.schedule


def lower_set_orders(
    graph: Graph,
    *,
    family: Family = "exact",
    centric: Centric | Literal["both"] = "both",
    limit: int = LIMIT,
    progress: Progress | None = None,
) -> Iterator[Order]:
    """The orders of runs of all sequences proposed, whatever the budget; the first keeps everything.

    A KeyboardInterrupt is passed on after the best sequence of the interrupted search.
    """
    yield first_order(graph)
    for order, _ in _Proposals(graph, family, _centrics(centric), limit, progress).grid(BUDGETS):
        yield order


def _centrics(centric: str) -> tuple[Centric, ...]:
    choices: dict[str, tuple[Centric, ...]] = {
        "time": ("time",),
        "memory": ("memory",),
        "both": ("time", "memory"),
    }
    if centric not in choices:
        raise LowtideError(f"centric {centric!r} is not known; choose one of {', '.join(choices)}")
    return choices[centric]


class _Best:
    """The best schedule looked at so far, and the formula that it came from."""

    def __init__(self, graph: Graph, budget: int) -> None:
        self.graph, self.budget = graph, budget
        self.schedule = keep_all(graph)
        self.timeline = simulate(graph, self.schedule)
        self.formula: Formula | None = None

    def look_at(self, order: Order, formula: Formula) -> None:
        schedule = with_drops(self.graph, *order)
        timeline = simulate(self.graph, schedule)
        if rank(timeline, self.budget) < rank(self.timeline, self.budget):
            self.schedule, self.timeline, self.formula = schedule, timeline, formula


class _Proposals:
    """Orders of runs from sequences of lower sets, each with the formula it is best by."""

    def __init__(
        self,
        graph: Graph,
        family: Family,
        centrics: Sequence[Centric],
        limit: int,
        progress: Progress | None,
    ) -> None:
        self.graph, self.centrics, self.progress = graph, centrics, progress
        self.done, self.whole = 0, 1
        self.first = first_order(graph)
        self.parts, sets = _family(graph, *self.first, family, limit)
        self.only_for_backward = only_for_backward(graph, self.parts)
        self.large = len(sets) > LARGE
        self.rounds = 1 if self.large else ROUNDS
        first = tables(self.parts.dag, sets, times=1, progress=self._report)
        self.tables = {
            times: replace(first, span=times * first.span) for times in (TIMES[:1] if self.large else TIMES)
        }
        self.tried: list[Formula] = []
        self.seen: set[tuple[int, ...]] = {first.sets[-1:]}

    def grid(self, count: int) -> Iterator[tuple[Order, Formula]]:
        """The proposals at budgets from the smallest feasible one to that of keeping everything."""
        count = count // 3 if self.large else count
        self.whole += len(self.tables) * (1 + count * len(self.centrics)) + 2 * self.rounds
        for times, family in self.tables.items():
            least = smallest_budget(family, tolerance=0.005, progress=self._report)
            low, high = max(least.bytes, 1), int(family.span[-1])
            yield from self._new(least, (times, low))
            for step in range(count if high > low else 0):
                yield from self._at((times, round(low * (high / low) ** (step / count))))

    def around(self, formula: Formula | None) -> Iterator[tuple[Order, Formula]]:
        """The proposals half way to the budgets tried below and above one."""
        if formula is None:
            return
        times, budget = formula
        tried = [other for its_times, other in self.tried if its_times == times]
        below = max((other for other in tried if other < budget), default=budget)
        above = min((other for other in tried if other > budget), default=budget)
        for middle in ((below + budget) // 2, (above + budget + 1) // 2):
            if middle not in tried:
                yield from self._at((times, middle))

    def _at(self, formula: Formula) -> Iterator[tuple[Order, Formula]]:
        self.tried.append(formula)
        times, budget = formula
        for centric in self.centrics:
            found = best_sequence(self.tables[times], budget, centric=centric, progress=self._report)
            if found is not None:
                yield from self._new(found, formula)

    def _report(self, share: float) -> None:
        """Turn the progress of one of many searches into that of all."""
        if self.progress is not None:
            self.progress(min((self.done + share) / self.whole, 1.0))

    def _new(self, found: Found, formula: Formula) -> Iterator[tuple[Order, Formula]]:
        if found.sequence not in self.seen:
            self.seen.add(found.sequence)
            plain = dropped_values(self.graph, self.parts, found.sequence, set())
            lean = dropped_values(self.graph, self.parts, found.sequence, self.only_for_backward)
            for dropped in (plain, lean) if lean != plain else (plain,):
                yield (self.first[0], backward_with_segments(self.graph, self.first, dropped)), formula
        if not found.complete:
            raise KeyboardInterrupt
        self.done += 1


def _family(
    graph: Graph, forward: Sequence[str], backward: Sequence[str], family: str, limit: int
) -> tuple[Contraction, list[int]]:
    """The intermediates and their lower sets, by the first way that stays within the limit."""
    if family not in ("exact", "approximate"):
        raise LowtideError(f"family {family!r} is not known; choose one of exact, approximate")
    parts = contract(graph, forward, backward)
    sets = ancestor_closures(parts.dag)
    if family == "approximate":
        return parts, sets
    try:
        return parts, all_lower_sets(parts.dag, limit=limit)
    except TooManyLowerSets:
        coarse = contract(graph, forward, backward, runs=True)
    try:
        return parts, sets + _expanded(all_lower_sets(coarse.dag, limit=limit), coarse, parts)
    except TooManyLowerSets:
        return parts, sets


def _expanded(sets: Sequence[int], coarse: Contraction, parts: Contraction) -> list[int]:
    """Lower sets of a coarser contraction as sets of the finer one's nodes."""
    node = {name: number for number, names in enumerate(parts.ops) for name in names}
    fine = [sum(1 << number for number in {node[name] for name in names}) for names in coarse.ops]
    return [sum(fine[number] for number in members(nodes)) for nodes in sets]
