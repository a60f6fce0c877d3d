r"""From a sequence of lower sets to an order of runs.

With ∅ = L_0 ⊂ L_1 ⊂ ... ⊂ L_k = V and segments V_i = L_i \ L_(i-1), the forward runs as ever. What is in
V_i but not in b(L_i) is dropped, for i < k; before the first op of the backward that reads something dropped
of V_i, those ops of V_i are recomputed, in order, that the backward needs. Where the drops go is liveness, in
`order`. O(ops + reads + writes).
"""

from __future__ import annotations

from collections.abc import Sequence

from ...plans.graph import Graph
from .contraction import Contraction
from .family import boundary, members

__all__ = ["Order", "dropped_values", "only_for_backward"]

Order = tuple[list[str], list[str]]


def only_for_backward(graph: Graph, parts: Contraction) -> set[str]:
    """Large values of a node that only the backward reads: caching the node need not keep them."""
    node = {name: number for number, names in enumerate(parts.ops) for name in names}
    crossing = {
        value
        for name, number in node.items()
        for value in graph.op[name].reads
        if value in graph.writer and node.get(graph.writer[value].name, number) != number
    }
    return {
        value
        for name, number in node.items()
        for value in graph.op[name].writes
        if value not in crossing and 8 * graph.value[value].bytes > parts.dag.bytes[number]
    }


def dropped_values(
    graph: Graph, parts: Contraction, sequence: Sequence[int], extra: set[str]
) -> dict[str, int]:
    """The segment of each value that is dropped, `extra` ones among them; the last segment is kept."""
    dropped: dict[str, int] = {}
    last = 0
    for index, lower in enumerate(sequence[:-1]):
        cached = boundary(parts.dag, lower)
        for node in members(lower & ~last):
            for op in map(graph.op.__getitem__, parts.ops[node]):
                for value in op.writes if op.kind != "pinned" else ():
                    if graph.value[value].droppable and (not cached >> node & 1 or value in extra):
                        dropped[value] = index
        last = lower
    return dropped
