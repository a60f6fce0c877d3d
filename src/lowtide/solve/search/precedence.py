"""Which first runs must come before which, whatever the order: what a search over orders has to keep.

An op comes after the writers of what it reads. Besides: the backward, and what writes a gradient, after the
moment between forward and backward, what writes an output before it; ops that are not pure in program order,
on the side of that moment where they have always been, so that random numbers and side effects stay what
they were; an update after all that reads what it changes. Everything else is free: a pure op that no output
needs may run on either side.

An order of runs with these first runs in order is a legal one as long as every other run comes after its op's
first one and before the update of what it reads.
"""

from __future__ import annotations

from itertools import pairwise

from ...plans.graph import Graph, Op
from ...plans.order import first_order

__all__ = ["precedence"]


def precedence(graph: Graph) -> list[list[int]]:
    """The ops that run before each op, by number; the last one is the moment between the phases."""
    number = {op.name: index for index, op in enumerate(graph.ops)}
    boundary = len(graph.ops)
    forward, backward = first_order(graph)
    before: list[set[int]] = [_writers(graph, op, number) for op in graph.ops]
    before.append({number[op.name] for op in graph.ops if _ends_in(graph, op)})
    fixed = [number[name] for name in (*forward, *backward) if graph.op[name].kind != "pure"]
    for first, second in pairwise(fixed):
        before[second].add(first)
    early = set(forward)
    for index in fixed:
        if graph.ops[index].name in early:
            before[boundary].add(index)
        else:
            before[index].add(boundary)
    if graph.returning is not None:  # the last of the forward
        last = number[graph.returning.name]
        before[last] |= before[boundary] - {last}
    for reader, updates in graph.updaters.items():
        for update in updates:
            before[number[update]].add(number[reader])
    return [sorted(found) for found in before]


def _writers(graph: Graph, op: Op, number: dict[str, int]) -> set[int]:
    """The ops that write what an op reads; for the backward, the moment before it as well."""
    found = {number[graph.writer[name].name] for name in op.reads if name in graph.writer}
    late = op.phase == "backward" or any(graph.value[name].kind == "gradient" for name in op.writes)
    return found | {len(graph.ops)} if late else found


def _ends_in(graph: Graph, op: Op) -> bool:
    """Whether an op writes an output, which is there before the backward."""
    return any(graph.value[name].kind == "output" for name in op.writes)
