"""Questions that one asks of fx nodes."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import torch
from torch import fx

from .._torch import private_of, storage_key
from ..errors import CaptureError
from .module_hooks import calls_hooks
from .rewrites import batchnorm
from .rewrites.accumulate import is_accumulation
from .rewrites.by_parts import is_by_parts
from .rewrites.collectives import is_collective, is_waiting
from .rewrites.handing import is_handing
from .rewrites.stepping import is_update

__all__ = [
    "depends_on",
    "feeding",
    "has_effect",
    "hooked_in_backward",
    "is_item",
    "is_mutation",
    "mark_backward",
    "mutations",
    "read_by",
    "storage_of",
    "tensors_of",
    "traced_in_backward",
]

aten = torch.ops.aten

_CHANGES_INPUTS = (aten.copy_.default, aten.set_.source_Tensor)
"""What AOTAutograd leaves of them in a graph: a write, and `tensor.data = other`."""


def tensors_of(node: fx.Node) -> list[torch.Tensor]:
    """The (fake) tensors that a node stands for."""
    value = node.meta.get("val")
    items = value if isinstance(value, list | tuple) else [value]
    return [item for item in items if isinstance(item, torch.Tensor)]


def read_by(node: fx.Node) -> list[torch.Tensor]:
    """The (fake) tensors that a node reads."""
    return [tensor for parent in node.all_input_nodes for tensor in tensors_of(parent)]


def storage_of(tensor: torch.Tensor) -> int:
    """What tells a tensor's storage from others."""
    if tensor.layout != torch.strided:
        raise CaptureError(
            f"a tensor of the step has the layout {tensor.layout}, which cannot be planned: "
            "use dense gradients, as in nn.Embedding(..., sparse=False)"
        )
    return storage_key(tensor)


def depends_on(graph: fx.Graph, sources: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes that depend on any of the sources, those included."""
    found = set(sources)
    for node in graph.nodes:
        if node.op != "output" and any(parent in found for parent in node.all_input_nodes):
            found.add(node)
    return found


def feeding(graph: fx.Graph, results: Iterable[Any]) -> set[fx.Node]:
    """The nodes that any of the results depends on, those included."""
    found = {node for node in results if isinstance(node, fx.Node)}
    for node in reversed(list(graph.nodes)):
        if node in found:
            found.update(node.all_input_nodes)
    return found


def is_mutation(node: fx.Node) -> bool:
    """Whether a node changes an input."""
    return node.op == "call_function" and node.target in _CHANGES_INPUTS


def has_effect(node: fx.Node) -> bool:
    """Whether a node must run even when nothing reads it."""
    if is_mutation(node) or any(
        has(node) for has in (is_accumulation, is_handing, is_update, is_by_parts, calls_hooks)
    ):
        return True
    return _has_effect_by_itself(node.target) or is_collective(node)


@lru_cache(4096)
def _has_effect_by_itself(operator: Any) -> bool:
    """Whether an operator has an effect, as far as its name and schema say."""
    if operator in batchnorm.UPDATES_STATISTICS or is_waiting(operator):
        return True
    if str(operator) == "with_effects":  # torch's wrapper of ops that print, assert or raise
        return True
    schema = private_of(operator, "schema", None)
    return bool(schema and schema.is_mutable)  # a mutable schema writes to an argument


def is_item(node: fx.Node) -> bool:
    """Whether a node takes one output of a node that has several."""
    return node.op == "call_function" and node.target is operator.getitem


def mutations(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that change inputs."""
    return [node for node in graph.nodes if is_mutation(node)]


_BACKWARD = "lowtide_traced_in_backward"


def mark_backward(graph: fx.Graph) -> None:
    """Mark what torch traced while autograd ran: what eager computes in the backward.

    torch tags the nodes of a joint graph (`partitioner_tag`, seen in 2.11-2.13), but not those of a custom
    function's backward: they are what comes after the forward. Writes into inputs come last, with a tag.
    """
    calls = [node for node in graph.nodes if node.op == "call_function"]
    tags = [node.meta.get("partitioner_tag") for node in calls]
    first = tags.index("is_backward") if "is_backward" in tags else len(tags)
    if "is_forward" in tags:
        # After the last node tagged forward: a custom function's backward has no tags at all.
        first = len(tags) - tags[::-1].index("is_forward")
    for node, tag in zip(calls[first:], tags[first:], strict=True):
        if tag != "must_be_in_forward":
            node.meta[_BACKWARD] = True


def hooked_in_backward(node: fx.Node) -> bool:
    """Whether a node calls hooks where the step's own backward does; a gradient inside of it may, too."""
    return calls_hooks(node) and traced_in_backward(node)


def traced_in_backward(node: fx.Node) -> bool:
    """Whether a node was marked, or stands in the place of one that was."""
    return _BACKWARD in node.meta
