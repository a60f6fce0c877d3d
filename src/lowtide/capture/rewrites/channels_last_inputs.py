"""Inputs that Inductor holds channels-last: copied so once, and read so by everything.

Where Inductor makes convolutions channels-last, it also copies inputs (a batch of images, weights that are
larger than 1x1) that go into one: as the step begins, if the backward is to have them. The copy is then
what the forward hands over, so it is alive until its last use in the backward. Here the copy becomes part of
the step, made where it is first read, so that it is planned; it is never recomputed, since for that
the tensor itself would be handed over, and that is what Inductor copies.

Limits: what no run in the backward reads is copied beside each convolution that reads it, and not at all for
a loop; there a plan has a copy for a while that may not be.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from ..fx_insert import call_before
from ..fx_nodes import feeding, mutations
from ..op_classes import type_of
from ..realize import image_in_memory

__all__ = ["copy_channels_last_once", "is_channels_last_copy"]

aten = torch.ops.aten


def copy_channels_last_once(graph: fx.Graph, primals: Iterable[fx.Node]) -> None:
    """Let everything that reads an input which Inductor would copy read one copy of it."""
    before = feeding(graph, graph.find_nodes(op="call_function", target=aten.convolution.default))
    written = {node.args[0] for node in mutations(graph)}
    for primal in primals:
        returned = any(user.op == "output" for user in primal.users)
        if primal in before and primal not in written and not returned and _has_channels_first(primal):
            _read_copy(primal)


def is_channels_last_copy(node: fx.Node) -> bool:
    """Whether a node is such a copy."""
    return type_of(node) == "lowtide.image_in_memory"


def _has_channels_first(node: fx.Node) -> bool:
    """Whether a tensor is an image, or as one, that would be another in memory with its channels last."""
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor) or value.dim() != 4:
        return False
    return value.is_contiguous() and not value.is_contiguous(memory_format=torch.channels_last)


def _read_copy(primal: fx.Node) -> None:
    users = list(primal.users)
    copy = call_before(min(users), image_in_memory(), primal)
    for user in users:
        user.replace_input_with(primal, copy)
