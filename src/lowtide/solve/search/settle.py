"""Rungs of small graphs, settled: no order is better, or one that is takes their place.

Problem: descents and annealing change an order a little at a time. On a small graph all orders can be looked
through (see `any_order`), often in a few thousandths of a second, because the plan that is known already says
where to stop.

Method: at the largest budget for which a rung is the answer, look for an order that is faster than it. The
answer holds down to the rung's own peak, so the next budget is right below that. Below the last rung look for
any order that fits, then for the fastest one with that peak. The same again at a budget that is asked for:
where no plan fits it, the user would be refused.

Complexity: `WORK` at most for each of the two, `WORK_AT_ONCE` of it for one budget; `WORK` once more at a
budget that is asked for.

Limits: those of `any_order`. What does not end within the work stays as it was.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from ..bound.method import bound_by_moments
from .any_order import AnyOrder

if TYPE_CHECKING:
    from .search import Search

__all__ = ["WORK", "settle", "settle_at", "settle_smallest"]

WORK, WORK_AT_ONCE, FITTING = 10_000_000, 1_000_000, 4
"""How much work in all, at one budget, and how many times that below the last rung and at a budget that is
asked for; ten million take less than half a second. Chosen, so that small graphs take as long as before: what
is settled is not annealed."""

ROUNDING = 1e-9
"""How much of the seconds of a step may be due to rounding."""


def settle(search: Search, work: int) -> set[int]:
    """Look for faster orders at each rung, from the fastest down; the budgets at which there are none."""
    settled: set[int] = set()
    if not work or not AnyOrder.handles(search.facts):
        return settled
    orders, budget = AnyOrder(search.facts), search.top - 1
    while work > 0 and (rung := search.ladder.best(budget)) is not None:
        limit = _limit(search, rung.seconds)
        found = orders.fastest(budget, limit=limit, work=min(work, WORK_AT_ONCE))
        work -= found.work
        if found.order is not None:
            search.note(search.tape(found.order))
            rung = search.ladder.best(budget) or rung
        if found.complete:
            settled.add(budget)
        # Nothing is faster from this budget down to the rung's own peak.
        budget = rung.peak - 1
    return settled


def settle_smallest(search: Search, work: int) -> None:
    """Look for orders with a smaller peak than any so far."""
    if not work or not AnyOrder.handles(search.facts):
        return
    orders = AnyOrder(search.facts)
    while work > 0 and not _proven_smallest(search):
        least = search.ladder[0].peak
        found = orders.fitting(least - 1, work=min(work, FITTING * WORK_AT_ONCE))
        work -= found.work
        if found.order is None:
            return
        tape = search.tape(found.order)
        tape.prune(least - 1)
        search.note(tape)
        limit = _limit(search, tape.seconds)
        faster = orders.fastest(tape.peak(), limit=limit, work=min(work, WORK_AT_ONCE))
        work -= faster.work
        if faster.order is not None:
            search.note(search.tape(faster.order))


def settle_at(search: Search, budget: int, work: int) -> None:
    """Look for an order that fits a budget where none is known, and for a faster one than is known."""
    if not work or not AnyOrder.handles(search.facts):
        return
    orders = AnyOrder(search.facts)
    if search.ladder.best(budget) is None and bound_by_moments(search.graph, budget) < inf:
        found = orders.fitting(budget, work=work)
        work -= found.work
        if found.order is not None:
            tape = search.tape(found.order)
            tape.prune(budget)
            search.note(tape)
    best = search.ladder.best(budget)
    if best is not None and work > 0:
        limit = _limit(search, best.seconds)
        faster = orders.fastest(budget, limit=limit, work=min(work, FITTING * WORK_AT_ONCE))
        if faster.order is not None:
            search.note(search.tape(faster.order))


def _proven_smallest(search: Search) -> bool:
    """Whether nothing fits below the smallest plan: the bound knows it for less than the search."""
    least = search.ladder[0].peak
    return least <= search.least_bytes or bound_by_moments(search.graph, least - 1) == inf


def _limit(search: Search, seconds: float) -> float:
    """What an order has to recompute less than to be faster: by a hair, or rounding would count."""
    return seconds - search.once * (1 + ROUNDING)
