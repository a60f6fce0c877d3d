"""Dropout in half precision on the CPU, as eager runs it.

Tracing turns dropout into one op with a boolean mask, which is smaller and, in single and double precision,
the same bit for bit. In half precision it rounds twice where eager rounds once, so there it becomes eager's
own arithmetic: the input times a noise tensor that is 0 or 1 / (1 - p).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ...torch_state.random_state import recompute

__all__ = ["RANDOM", "as_in_eager"]

aten = torch.ops.aten
_HALF = (torch.bfloat16, torch.float16)


def dropout(x: Any, p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The output and the noise."""
    noise = aten.empty_like.default(x)
    aten.bernoulli_.float(noise, 1 - p)
    aten.div_.Scalar(noise, 1 - p)
    return aten.mul.Tensor(x, noise), noise


def dropout_recomputed(state: torch.Tensor, device: str, x: Any, p: float) -> Any:
    """The same output and noise, from the saved random state."""
    return recompute(state, device, dropout, x, p)


RANDOM: dict[Callable[..., Any], Callable[..., Any]] = {dropout: dropout_recomputed}
"""Functions that draw random numbers, and what runs in their place when they are recomputed."""


def as_in_eager(graph: fx.Graph) -> None:
    """Replace half-precision `native_dropout` on the CPU, and its backward, by eager's arithmetic."""
    for node in graph.find_nodes(op="call_function", target=aten.native_dropout.default):
        x: Any = node.args[0]
        value = x.meta["val"]
        train, p = node.args[2], node.args[1]
        # Elsewhere both forms round alike; with a rate of 0 or 1 nothing is drawn.
        if value.device.type == "cpu" and value.dtype in _HALF and train and 0 < p < 1:  # type: ignore[operator]
            _replace(graph, node, x, p)


def _replace(graph: fx.Graph, node: fx.Node, x: fx.Node, p: Any) -> None:
    value = x.meta["val"]
    with value.fake_mode:
        noise = torch.empty_like(value)
    with graph.inserting_before(node):
        made = graph.call_function(dropout, (x, p))
    made.meta = {**node.meta, "val": (node.meta["val"][0], noise)}
    for item in list(node.users):
        item.replace_input_with(node, made)
        if item.args[1] == 1:
            item.meta["val"] = noise
            _replace_backward(graph, item)
    graph.erase_node(node)


def _replace_backward(graph: fx.Graph, mask: fx.Node) -> None:
    for user in list(mask.users):
        if user.target is aten.native_dropout_backward.default:
            user.target = aten.mul.Tensor
            user.args = (user.args[0], mask)
