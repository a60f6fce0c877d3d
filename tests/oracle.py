"""The exact optimum of tiny graphs, by Dijkstra over (next first run, set of values that are there).

First runs stay in the order of keeping everything, as they do in every solver here; anything may run again
in between and anything may be dropped. Saved random states are not modelled: use graphs without them.
"""

from __future__ import annotations

import heapq
from itertools import count

from lowtide.plans.graph import GIVEN_KINDS, Graph
from lowtide.plans.order import first_order


def best_seconds(graph: Graph, budget: int) -> float | None:
    """The least seconds of any schedule under the budget, or None when there is none."""
    forward, backward = first_order(graph)
    order = [*forward, None, *backward]
    split = len(forward)
    base = graph.fixed_bytes + sum(v.bytes for v in graph.values if v.kind in GIVEN_KINDS)
    given = frozenset(value.name for value in graph.values if value.kind in GIVEN_KINDS)
    tangents = frozenset(value.name for value in graph.values if value.kind == "tangent")
    size = {value.name: value.bytes for value in graph.values}
    ties = count()
    heap = [(0.0, next(ties), 0, frozenset())]
    done = set()
    while heap:
        seconds, _, at, there = heapq.heappop(heap)
        if (at, there) in done:
            continue
        done.add((at, there))
        if at == len(order):
            return seconds
        level = base + sum(size[name] for name in there)
        moves = [(seconds, at, there - {name}) for name in there if graph.value[name].droppable]
        between = level + graph.boundary + sum(size[name] for name in tangents)
        if order[at] is None and between <= budget:
            moves.append((seconds, at + 1, there | tangents))
        for position, name in enumerate(order[: at + 1]):
            if name is None or (position < at and graph.op[name].kind == "pinned"):
                continue
            op = graph.op[name]
            if not set(graph.updaters.get(name, ())).isdisjoint(order[:at]):
                continue
            if position < at and op.phase == "backward" and at <= split:
                continue
            if not all(value in there or value in given for value in op.reads):
                continue
            need = level + sum(size[value] for value in op.writes) + op.workspace
            after = seconds + op.seconds, at + (position == at)
            if need <= budget:
                moves.append((*after, there | set(op.writes)))
            for taken in op.takes:
                if need - size[taken] <= budget:
                    moves.append((*after, there - {taken} | set(op.writes)))
        for cost, after, values in moves:
            if (after, values) not in done:
                heapq.heappush(heap, (cost, next(ties), after, values))
    return None
