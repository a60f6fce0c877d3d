"""Gradients that a step asks for itself, traced with it: where torch's front end says yes and where no.

It has one setting for `torch.autograd.grad`, which gives tensors, and `backward()`, which writes to `.grad`
outside of the step; and it refuses all that depends on a leaf that the step makes. Both are functions of its
own that are replaced here, once and for good; they ask whether this thread captures for Lowtide.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ..process_wide import attributes
from .names import private
from .traces import traced_value

_CHECK = "_check_requires_grad_intermediate_outputs"


@functools.cache
def leaves_may_be_inside() -> bool:
    """Whether a traced step may make a leaf by `requires_grad_()`: in torch 2.13, not in 2.11."""
    return hasattr(private("TracedGraph"), _CHECK)


@functools.cache
def let_leaves_be_inside(captures: Callable[[], bool]) -> None:
    """Let a step be captured whose outputs depend on a leaf that it makes, as those of gradient penalties do.

    The front end refuses these, since an output may require a gradient because of that leaf alone, which
    AOTAutograd does not see. Of an output that depends on what is trained as well it makes no difference
    (`_check_requires_grad_intermediate_outputs`, seen in 2.13).
    """
    if not leaves_may_be_inside():
        return
    traced = private("TracedGraph")
    check = getattr(traced, _CHECK)

    def check_outputs(self: Any, outputs: Any, tracer: Any) -> None:
        if captures():
            made = {id(leaf) for leaf in map(_fake, self.leaf_var_creation_order)}
            outputs = [output for output in outputs if not _leaves_of(_fake(output)) - made]
        check(self, outputs, tracer)

    setattr(traced, _CHECK, check_outputs)


@functools.cache
def let_no_backward_be_inside(captures: Callable[[], bool]) -> None:
    """Stop at `backward()` where gradients that a step asks for are traced (`method_backward`, in 2.13)."""
    traced, config = private("TracedTensor"), private("dynamo_config")
    backward = getattr(traced, "method_backward", None)
    if backward is None:
        return

    def method_backward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not captures():
            return backward(self, *args, **kwargs)
        with attributes(config, trace_autograd_ops=False):
            return backward(self, *args, **kwargs)

    traced.method_backward = method_backward


def _fake(variable: Any) -> Any:
    """The fake tensor of what the front end traces; None of what is no tensor."""
    return traced_value(variable.as_proxy().node) if isinstance(variable, private("TracedTensor")) else None


def _leaves_of(tensor: torch.Tensor | None) -> set[int]:
    """The leaves that autograd would give a gradient to in a backward from a tensor, but itself."""
    waiting: list[Any] = [] if tensor is None else [tensor.grad_fn]
    seen: set[Any] = {None}
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting += [after for after, _ in node.next_functions]
    return {id(node.variable) for node in seen if hasattr(node, "variable")}
