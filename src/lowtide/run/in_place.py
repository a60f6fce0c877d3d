"""Which nodes of a lowered graph overwrite an argument: those that are marked, where nobody reads it later.

A schedule drops what is overwritten, so in the graph that it was lowered to no later node reads it. But that
graph changes where a gradient does not come: a sum of which one summand is missing becomes the other one, and
a value that was gone by then is read again. So each mark is looked at anew, by what shares a storage; one
that does not hold is passed over, and the op makes a new tensor. O(nodes + arguments).
"""

from __future__ import annotations

from typing import TypeAlias

from torch import fx

from ..capture.fx_nodes import storage_of, tensors_of
from ..capture.in_place import IN_PLACE, InPlace

__all__ = ["overwriting"]

_Storage: TypeAlias = tuple[fx.Node, int]
"""The node that makes a storage, and which of its tensors' it is: a recomputed one has another node."""


def overwriting(graph: fx.Graph, *, saved: bool = True) -> dict[fx.Node, InPlace]:
    """The nodes that overwrite an argument, and how; without `saved`, none that came into the graph."""
    marked = [(node, node.meta[IN_PLACE]) for node in graph.nodes if IN_PLACE in node.meta]
    if not marked:
        return {}
    place = {node: index for index, node in enumerate(graph.nodes)}
    storages = _storages(graph)
    last_use: dict[_Storage, int] = {}
    for node, found in storages.items():
        last = max((place[user] for user in node.users), default=-1)
        for storage in found.values():
            last_use[storage] = max(last_use.get(storage, -1), last)

    def is_free(node: fx.Node, how: InPlace) -> bool:
        taken = node.args[how.place]
        found = list(storages.get(taken, {}).values()) if isinstance(taken, fx.Node) else []
        known = saved or all(maker.op != "placeholder" for maker, _ in found)
        return len(found) == 1 and known and last_use[found[0]] <= place[node]

    return {node: how for node, how in marked if is_free(node, how)}


def _storages(graph: fx.Graph) -> dict[fx.Node, dict[int, _Storage]]:
    """For each node the storages of its tensors: those of what it looks at, or its own."""
    found: dict[fx.Node, dict[int, _Storage]] = {}
    for node in graph.nodes:
        seen = {key: storage for parent in node.all_input_nodes for key, storage in found[parent].items()}
        keys = [storage_of(tensor) for tensor in tensors_of(node)] if node.op != "output" else []
        found[node] = {key: seen.get(key, (node, key)) for key in keys}
    return found
