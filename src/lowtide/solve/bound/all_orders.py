"""A lower bound for small graphs from the search over all orders of runs: near the smallest peak, too.

Problem: one moment of a step does not see what has to be recomputed several times.

Method: `any_order` looks through all orders and says what the fastest one recomputes, or, when its work is
over before, below what no order stays. It asks for a little more than the simulator does (that ops with an
effect keep their order, and that gradients are written in the backward), so it is given a graph that asks for
less: every op is pure and takes no saved random state, nothing is updated, nothing has to come after the step
has returned, and a gradient that may be written in the forward is a value that somebody holds. A pinned op,
which never runs again, takes longer to run again than all else together. Each schedule of the step is one of
that graph with the same recomputations and no larger peak, so what holds for all of those holds for it.

Complexity: `WORK`, less than a tenth of a second.

Limits: graphs of up to 63 ops, the compiled search, and steps that are not nearly as long as a graph may
say at most; else the bound is that of running all once. Where the work runs out the bound is what the best
state so far owes, which may be less at a smaller budget. Proven up to the rounding of adding up
floating-point seconds.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf

from ...plans.graph import MOST_SECONDS, Graph, Op, Value
from ..search.any_order import AnyOrder
from ..search.tape import Facts
from .moments import RequiredOps

__all__ = ["bound_by_orders"]

WORK = 500_000
"""Runs and drops to look at. Chosen, for a small part of the time of planning a small graph."""


def bound_by_orders(graph: Graph, budget: int) -> float:
    """Seconds that no schedule under the budget can beat; infinity when it is proven that none fits."""
    once, dear = RequiredOps(graph).once, 2 * graph.seconds + 1
    if dear * (1 + len(graph.ops)) > MOST_SECONDS:
        return once
    facts = Facts(_relaxed(graph, dear))
    if not AnyOrder.handles(facts):
        return once
    found = AnyOrder(facts).fastest(budget, work=WORK)
    # A pinned op would have to run again.
    if found.seconds >= dear:
        return inf
    return once + found.seconds


def _relaxed(graph: Graph, dear: float) -> Graph:
    """The graph with no effects, no random states and no place for its gradients."""
    return graph.replace(
        ops=tuple(_free(op, dear) for op in graph.ops), values=tuple(_held(graph, v) for v in graph.values)
    )


def _free(op: Op, dear: float) -> Op:
    seconds = dear if op.kind == "pinned" else op.seconds
    return replace(op, kind="pure", state=0, updates=(), target="", seconds=seconds)


def _held(graph: Graph, value: Value) -> Value:
    if value.kind == "gradient" and graph.writer[value.name].phase == "forward":
        return replace(value, kind="activation", held=True)
    return value
