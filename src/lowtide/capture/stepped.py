"""Whose parameters an optimizer updates inside of the backward, with `step_in_backward=True`.

Those of its parameters that the step trains, as long as nobody else has a claim to the gradient or to the
memory: hooks on a parameter get its gradient from autograd, a parameter whose storage another input looks at
may be read by that name later, and of one that is made of other tensors torch hands over the parts. The
gradients of those are left in `.grad`, and the training loop's own `optimizer.step()` uses them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from .._torch import inner_tensors, is_made_of_others, storage_key
from .awaited import has_hooks
from .fx_nodes import is_item, storage_of, tensors_of

__all__ = ["stepped", "used_up"]


def stepped(
    inputs: Sequence[Any], leaves: Mapping[int, torch.Tensor], optimizers: Iterable[Any]
) -> frozenset[int]:
    """The places of the leaves that are updated inside of the backward."""
    trained = [p for one in optimizers for group in one.param_groups for p in group["params"]]
    if not trained:
        return frozenset()
    if all(parameter.is_meta for parameter in trained):  # others stand for them while a step is planned
        return frozenset(place for place, leaf in leaves.items() if isinstance(leaf, torch.nn.Parameter))
    own = set(map(id, trained))
    shown: Counter[int] = Counter(
        storage_key(tensor)
        for item in inputs
        for tensor in inner_tensors(item).values()
        if tensor.layout == torch.strided
    )

    def is_alone(leaf: torch.Tensor) -> bool:
        return leaf.layout == torch.strided and shown[storage_key(leaf)] == 1

    return frozenset(
        place
        for place, leaf in leaves.items()
        if id(leaf) in own
        if not has_hooks(leaf) and not is_made_of_others(leaf) and is_alone(leaf)
    )


def used_up(graph: fx.Graph, gradients: Sequence[Any], places: Iterable[int]) -> list[int]:
    """Those of the places whose gradient nothing else reads: an optimizer may write to it."""
    wanted = {place: gradients[place] for place in places if isinstance(gradients[place], fx.Node)}
    nodes = {storage_of(node.meta["val"]): place for place, node in wanted.items() if tensors_of(node)}
    read: set[int] = set()
    for node in graph.nodes:
        if node.op == "output" or is_item(node):
            continue
        own = {storage_of(tensor) for tensor in tensors_of(node)}  # a view reads nothing
        for parent in node.all_input_nodes:
            read.update(storage_of(tensor) for tensor in tensors_of(parent) if storage_of(tensor) not in own)
    return sorted(place for storage, place in nodes.items() if storage not in read)
