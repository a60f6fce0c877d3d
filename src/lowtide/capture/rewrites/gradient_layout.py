"""Gradients laid out as autograd keeps them.

`.grad` gets the tensor that the backward returns, without a copy, only when nobody else holds it and it has
the strides of its parameter; an expanded, shared or transposed gradient is copied, and the copy would be in
nobody's plan. So the copy is made inside the step.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import fx

from ..fx_nodes import storage_of
from .accumulate import is_accumulation

__all__ = ["lay_out"]


def laid_out(gradient: torch.Tensor, shape: list[int], stride: list[int]) -> torch.Tensor:
    """A copy of a gradient with its tensor's own strides, as autograd would make it."""
    return torch.empty_strided(shape, stride, dtype=gradient.dtype, device=gradient.device).copy_(gradient)


def lay_out(graph: fx.Graph, primals: list[fx.Node], results: list[Any], leaves: frozenset[int]) -> list[Any]:
    """The gradients, with a copy where autograd would copy before it keeps one."""
    storages: Counter[int] = Counter(_storage(node) for node in results if isinstance(node, fx.Node))
    # A gradient that is an input itself (the derivative of a sum is its tangent, expanded) is somebody's
    # already.
    storages.update(_storage(node) for node in graph.find_nodes(op="placeholder"))
    out = list(results)
    for index in sorted(leaves):
        gradient, wanted = results[index], primals[index].meta["val"]
        if not isinstance(gradient, fx.Node) or is_accumulation(gradient):
            continue
        if not isinstance(wanted, torch.Tensor):  # what a DTensor has beside its local tensor
            continue
        if storages[_storage(gradient)] > 1 or gradient.meta["val"].stride() != wanted.stride():
            out[index] = _copied(graph, gradient, wanted)
    return out


def _storage(node: fx.Node) -> int:
    value = node.meta.get("val")
    return storage_of(value) if isinstance(value, torch.Tensor) else 0


def _copied(graph: fx.Graph, gradient: fx.Node, like: torch.Tensor) -> fx.Node:
    first = next(node for node in graph.nodes if node.op != "placeholder")
    given = gradient.op == "placeholder"
    with graph.inserting_before(first) if given else graph.inserting_after(gradient):
        copy = graph.call_function(laid_out, (gradient, list(like.shape), list(like.stride())))
    with like.fake_mode:  # type: ignore[attr-defined]
        value = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
    copy.meta = {**gradient.meta, "val": value}
    return copy
