"""Gradients that are added where they are made.

Under AOTAutograd all parameter gradients come back at the end of the backward, so with gradient
accumulation a whole new set would sit beside the old one. Here each new gradient is added to `.grad` as soon
as it is complete, and freed: the same sum that autograd forms, bit for bit, without the second set.
Autograd keeps its job wherever somebody could notice: with hooks on the parameter, under
`torch.autograd.grad`, and in distributed training.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..._torch import in_process_group, private, private_of

__all__ = ["accumulate", "insert"]


def accumulate(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor | None:
    """Add a gradient to the parameter's own; what is returned is left for autograd to add."""
    present = parameter.grad if parameter.is_leaf else None
    if present is None or not _may_add(parameter, present, gradient):
        return gradient
    present.add_(gradient)
    return None


def _may_add(parameter: torch.Tensor, present: torch.Tensor, gradient: torch.Tensor) -> bool:
    alike = (present.shape, present.dtype, present.device) == (
        gradient.shape,
        gradient.dtype,
        gradient.device,
    )
    # Hooks, DDP's reducers and a gradient with a graph of its own must see the gradient itself: autograd adds
    # it.
    hooked = private_of(parameter, "backward_hooks") or private_of(parameter, "accumulated_hooks")
    if not alike or hooked or in_process_group() or present.requires_grad or present.layout != torch.strided:
        return False
    try:
        node = torch.autograd.graph.get_gradient_edge(parameter).node
        return bool(private("engine_will_run")(node))
    except RuntimeError:  # torch.autograd.grad: the gradient is asked for, not accumulated
        return False


def insert(graph: fx.Graph, pairs: list[tuple[fx.Node, fx.Node]]) -> dict[fx.Node, fx.Node]:
    """Put an `accumulate` after each (parameter, gradient) and give the new node for each gradient."""
    added: dict[fx.Node, fx.Node] = {}
    for parameter, gradient in pairs:
        with graph.inserting_after(gradient):
            node = graph.call_function(accumulate, (parameter, gradient))
        node.meta = {key: value for key, value in gradient.meta.items() if key != "val"}
        added[gradient] = node
    return added


def is_accumulation(node: Any) -> bool:
    """Whether an fx node adds a gradient to a parameter's own."""
    return isinstance(node, fx.Node) and node.target is accumulate
