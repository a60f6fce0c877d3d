"""Gradients that an optimizer uses up inside of the backward, and the nodes where it does.

Where a gradient is complete, a node here stands for the optimizer's update of its parameter, after which the
gradient is free (LOMO, Lv et al. 2023; torchtune's optimizer in backward). The gradients of the whole model
are then never there at once. Each call of an optimizer takes some time, so small gradients wait for each
other, in the order in which they are complete: a node takes as many as are a share of all bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import fx

__all__ = ["insert", "is_update", "update"]

_UPDATES = 64
"""Into how many nodes all gradients would go if they were of one size; chosen: two or three for each layer of
a language model, which hold 1.6 % of all gradients and take a tenth of a millisecond each."""


def update(places: tuple[int, ...], gradients: list[torch.Tensor]) -> None:
    """Mark where an optimizer updates some inputs; an executor writes what does it there."""
    raise AssertionError(f"the inputs {places} are updated by an executor")


def insert(graph: fx.Graph, gradients: list[Any], places: Iterable[int]) -> list[Any]:
    """The gradients, those of the given places replaced by the node that uses them up."""
    left = list(gradients)
    for group in _groups(graph, {gradients[place]: place for place in places}):
        with graph.inserting_after(gradients[group[-1]]):
            node = graph.call_function(update, (group, [gradients[place] for place in group]))
        meta = gradients[group[-1]].meta
        node.meta = {key: value for key, value in meta.items() if key != "val"}
        for place in group:
            left[place] = node
    return left


def _groups(graph: fx.Graph, place_of: dict[fx.Node, int]) -> Iterator[tuple[int, ...]]:
    """The places, in the order in which gradients are complete, as many at a time as are a share of all."""
    enough = sum(map(_bytes, place_of)) / _UPDATES
    waiting: list[fx.Node] = []
    for node in (node for node in graph.nodes if node in place_of):
        waiting.append(node)
        if sum(map(_bytes, waiting)) >= enough:
            yield tuple(place_of[each] for each in waiting)
            waiting = []
    if waiting:
        yield tuple(place_of[each] for each in waiting)


def _bytes(node: fx.Node) -> int:
    value = node.meta["val"]
    return int(value.numel() * value.element_size())


def is_update(node: Any) -> bool:
    """Whether an fx node stands for an optimizer's update."""
    return isinstance(node, fx.Node) and node.target is update
