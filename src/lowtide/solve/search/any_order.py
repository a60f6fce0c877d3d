"""The fastest order of runs of a small graph, of all orders there are: what no local search can promise.

Problem: which op runs when, for the first time or once more, so that everything fits under a budget and as
little as possible is recomputed?

Method: A* (Hart, Nilsson, Raphael 1968) over states: the ops that have run, and the values that are there. Of
the values only as many are dropped as the next run needs, in all smallest ways, because what is there can be
dropped later for nothing. A saved random state is one more value, which the first run of its op may or may
not write. What a state still owes is at least the seconds of all ops that certainly run again: the writers of
what is still to be read and is gone, and of what those read. That estimate is never too large and never falls
by more than what is spent, so the first complete state is a fastest one; and where no state is left that owes
less than a limit, there is none below it. `precedence` says which orders of first runs are legal.

Complexity: exponential at worst. Counted in runs and drops that were looked at, about ten million a second:
most graphs of 30 ops take a thousandth of a second to some seconds. It takes the compiled search.

Limits: `MOST` ops and values. Near the smallest peak, where almost anything may have to be recomputed, the
estimate says little and the work often runs out.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from math import inf

import numpy as np

from ...plans.order import first_order
from .native import NoMemory, library
from .tape import Facts

__all__ = ["MOST", "AnyOrder", "Found"]

MOST = 64
"""Ops, the moment between forward and backward included, and droppable values with the random states: a bit
of a machine word for each."""

NO_MEMORY_FOR_ORDERS = -2
"""What C gives where its memory has run out."""

LONGEST = 10_000
"""Runs of an order; a longer one is no answer. No order of 64 ops that was seen has a tenth of them."""


@dataclass(frozen=True)
class Found:
    """An order of runs (None: none was found), and the seconds that it recomputes.

    `complete` says that the search came to its end: the order is a fastest one, or there is none below the
    limit. Otherwise no order recomputes less than `seconds`. `work` is what the search took.
    """

    order: list[int] | None
    seconds: float
    complete: bool
    work: int


class AnyOrder:
    """The search over all orders of one graph."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        names = [name for part in first_order(facts.graph) for name in part]
        self.must = np.zeros(len(facts.own), dtype=np.uint8)
        self.must[[*(facts.number[name] for name in names), facts.boundary]] = 1

    @staticmethod
    def handles(facts: Facts) -> bool:
        """Whether a graph is small enough, and the compiled search is there."""
        values = len(facts.size) + sum(state > 0 for state in facts.state)
        return max(len(facts.own), values) <= MOST and library() is not None

    def fastest(self, budget: int, *, limit: float = inf, work: int) -> Found:
        """The order under a budget that recomputes for the fewest seconds, if those are below the limit."""
        return self._search(budget, limit, work, free_of_charge=False)

    def fitting(self, budget: int, *, work: int) -> Found:
        """Some order under a budget, whatever it recomputes."""
        return self._search(budget, 1.0, work, free_of_charge=True)

    def _search(self, budget: int, limit: float, work: int, *, free_of_charge: bool) -> Found:
        found = library()
        assert found is not None, "there is no compiled search"
        order, owed, done = np.empty(LONGEST, dtype=np.int32), ctypes.c_double(), ctypes.c_int64()
        arrays = ctypes.byref(self.facts.native.struct), self.must.ctypes.data
        options = budget, limit, free_of_charge, work, order.ctypes.data, LONGEST
        count = found.lowtide_any_order(*arrays, *options, ctypes.byref(owed), ctypes.byref(done))
        if count == NO_MEMORY_FOR_ORDERS:
            raise NoMemory
        runs: list[int] | None = order[:count].tolist() if count > 0 else None
        return Found(runs, owed.value, count >= 0, done.value)
