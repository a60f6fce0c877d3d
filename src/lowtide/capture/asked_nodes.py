"""What a condition on a batch is computed from: nodes of a trace, with what writes to them in place before.

`mask = mask.clone(); mask[:, 0] = 1` leaves a node that nobody reads, and that all later readers of the mask
depend on. Writes are known by their calls (`x[...] = y`, `x |= y`, `x.fill_(y)`), and how many there were by
the version of the fake tensor: where the numbers differ, something else has written.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Iterator

import torch
from torch import fx

from .._torch import private, private_of, storage_key, traced_value
from .sizes_by_symbols import read_for

__all__ = ["all_writes_known", "changed", "what_it_reads", "writes"]

_IN_PLACE = (operator.setitem, operator.iadd, operator.isub, operator.imul, operator.ior, operator.iand)


def what_it_reads(conditions: Iterable[fx.Node]) -> list[fx.Node]:
    """All nodes that some nodes are computed from, and they themselves, in the order of their graph."""
    asked = list(conditions)
    found = set[fx.Node]().union(*map(_read_for, asked))
    return [node for node in asked[0].graph.nodes if node in found]


def _read_for(condition: fx.Node) -> set[fx.Node]:
    found, waiting = set[fx.Node](), [condition]
    writers: list[tuple[fx.Node, set[int]]] | None = None
    while waiting:
        node = waiting.pop()
        if node in found:
            continue
        found.add(node)
        waiting += read_for(node)
        if node.op != "placeholder" and changed(node):
            writers = _writers_before(condition) if writers is None else writers
            mine = storages(node)
            waiting += [writer for writer, others in writers if not mine.isdisjoint(others)]
    return found


def _writers_before(condition: fx.Node) -> list[tuple[fx.Node, set[int]]]:
    found = []
    for node in condition.graph.nodes:
        if node is condition:
            break
        if writes(node):
            found.append((node, storages(node.args[0])))
    return found


def writes(node: fx.Node) -> bool:
    """Whether a node writes to its first argument, as far as that is known."""
    if not (node.args and isinstance(node.args[0], fx.Node)):
        return False
    name = str(node.target)
    method = node.op == "call_method" and name.endswith("_") and not name.endswith("__")
    return method or node.target in _IN_PLACE


def changed(node: fx.Node) -> bool:
    """Whether something was written to a node's tensors in the trace so far."""
    return any(private_of(tensor, "version") for tensor in _tensors(node))


def all_writes_known(nodes: list[fx.Node]) -> bool:
    """Whether all that was written to some nodes in the trace so far was written by nodes among them."""
    known = Counter(key for node in nodes if writes(node) for key in storages(node.args[0]))
    made = (node for node in nodes if node.op != "placeholder")
    return all(
        private_of(tensor, "version") == known[storage_key(tensor)]
        for node in made
        for tensor in _tensors(node)
        if private_of(tensor, "version")
    )


def storages(node: object) -> set[int]:
    """The storages of a node's tensors."""
    return {storage_key(tensor) for tensor in _tensors(node)}


def _tensors(node: object) -> Iterator[torch.Tensor]:
    value = traced_value(node) if isinstance(node, fx.Node) else None
    for leaf in private("tree_leaves")(value):
        if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided:
            yield leaf
