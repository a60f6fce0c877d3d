"""Gradients that are handed to autograd where they are complete, not at the end of the backward.

Under AOTAutograd all gradients of a step come back together when its backward is over. Who waits for them has
to wait until then: DistributedDataParallel starts no all-reduce before, and hooks that step an optimizer and
let the gradient go run when a whole set is there. So the gradients of *awaited* leaves leave the backward one
group after the other (`run/handing.py`).

Most gradients stay in `.grad` afterwards, and their plan is that of a step whose gradients nobody awaits.
Some are gone as soon as they are handed over: those that autograd adds to what is there, and those that DDP
copies into its buckets for good (`gradient_as_bucket_view=True`). For these the graph has an op here, after
which the gradient is free.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

__all__ = ["hand_over", "insert", "is_handing"]


def hand_over(places: tuple[int, ...], gradients: list[torch.Tensor]) -> None:
    """Mark where the gradients of some inputs are handed over; an executor writes what does it there."""
    raise AssertionError(f"the gradients of the inputs {places} are handed over by an executor")


def insert(graph: fx.Graph, gradients: list[Any], places: Iterable[int]) -> list[Any]:
    """The gradients, those that are gone once they are handed over replaced by the node that does it."""
    left = list(gradients)
    for place in places:
        gradient = gradients[place]
        with graph.inserting_after(gradient):
            node = graph.call_function(hand_over, ((place,), [gradient]))
        node.meta = {key: value for key, value in gradient.meta.items() if key != "val"}
        left[place] = node
    return left


def is_handing(node: Any) -> bool:
    """Whether an fx node hands gradients over."""
    return isinstance(node, fx.Node) and node.target is hand_over
