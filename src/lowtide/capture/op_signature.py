"""What makes two calls of an operator the same to its kernel: operator, arguments, how tensors lie."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from .fx_nodes import tensors_of
from .kernel_outputs import lazy

__all__ = ["signature"]


def signature(node: fx.Node, tensors: Callable[[fx.Node], list[torch.Tensor]] = tensors_of) -> str:
    """What makes two calls of an operator cost the same; `tensors` are those that a node stands for."""
    target = str(node.target) if hasattr(node.target, "overloadpacket") else node.target.__name__  # type: ignore[union-attr]
    given = [_describe_argument(value, tensors) for value in node.args]
    named = [f"{key}={_describe_argument(value, tensors)}" for key, value in node.kwargs.items()]
    return f"{target}({','.join(given + named)})"


def _describe_argument(argument: Any, tensors: Callable[[fx.Node], list[torch.Tensor]]) -> str:
    if isinstance(argument, fx.Node):
        return "+".join(map(_describe_tensor, tensors(argument))) or argument.op
    if isinstance(argument, list | tuple):
        return "[" + ",".join(_describe_argument(item, tensors) for item in argument) + "]"
    return repr(argument)


def _describe_tensor(tensor: torch.Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    # A view into a larger storage may be aligned otherwise, and then another kernel runs.
    part = "" if _fills_storage(tensor) else f"@{tensor.storage_offset()}/{tensor.untyped_storage().nbytes()}"
    part += lazy(tensor)
    return f"{dtype}{list(tensor.shape)}{list(tensor.stride())}{part}{tensor.device.type[:4]}".replace(
        " ", ""
    )


def _fills_storage(tensor: torch.Tensor) -> bool:
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
