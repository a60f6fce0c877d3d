"""Plans of a step put on the same step at another shape.

Problem: a batch of another length, or a smaller last one of an epoch, gives a graph of the same ops that
differs in bytes and seconds alone. A search takes seconds; what it would find is nearly what it found before.

Method: an order of runs is valid on every graph of the same structure (`Graph.structure`). So all orders of a
ladder are judged again on this graph; the undominated ones are a ladder of it. Then one budget is worked on:
the fastest plan that fits lets go of the recomputations that are not needed at these bytes, and the next
larger plans, and the fastest of all, are brought down to the budget. Rungs that lie between budgets are never
worked on, which a search of the whole ladder has to do.

Complexity: O(orders · (runs + reads + writes)) to judge, and a few descents: milliseconds where a search
takes a second.

Limits: near the smallest peak a search finds better plans. `planner/other_shapes.py` says when to search.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ...plans.graph import Graph
from .ladder import Ladder, Rung
from .native import judge
from .search import EXPONENTS, Search

__all__ = ["Orders", "carry"]

Orders: TypeAlias = Sequence[npt.NDArray[np.int32]]
"""Orders of runs, by the numbers of `tape.Facts`."""

FROM_THE_TOP = 2
"""How many exponents to descend with from the fastest plan. Chosen: with none, one plan in 20 is slower, by
up to 0.7 %."""


def carry(graph: Graph, orders: Orders, budget: int, *, native: bool = True) -> Ladder:
    """The ladder of a graph from orders that were found for others of its structure, for one budget."""
    search = Search(graph, native=native)
    for order in orders:
        _judge(search, order)
    best = search.ladder.best(budget)
    if best is not None and search.short(best.order):
        tape = search.tape(best.order.tolist())
        tape.prune(budget)
        search.note(tape)
    above = [rung for rung in search.ladder if rung.peak > budget and search.short(rung.order)]
    for rung in above[: search.effort.grafts]:
        search.attempt(search.tape(rung.order.tolist()), budget, EXPONENTS[0])
    if above:
        fastest = search.tape(above[-1].order.tolist())
        for exponent in EXPONENTS[:FROM_THE_TOP]:
            search.attempt(fastest, budget, exponent)
    return search.ladder


def _judge(search: Search, order: npt.NDArray[np.int32]) -> None:
    if not search.native:
        search.note(search.tape(order.tolist()))
        return
    peak, seconds = judge(search.facts, order)
    search.ladder.add(Rung(peak, seconds, order))
