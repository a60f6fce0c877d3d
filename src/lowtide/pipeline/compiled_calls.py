"""Calls that torch.compile captures: which of them are alike, and a code object of its own for each."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch

from .._torch import count_global_hooks, private
from ..capture.awaited import synchronises
from ..torch_state.autocast_state import present_state

__all__ = ["fresh", "key_of"]


def fresh(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same call behind a code object of its own."""

    def step(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return types.FunctionType(
        step.__code__.replace(), step.__globals__, step.__name__, step.__defaults__, step.__closure__
    )


def key_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """What a plan depends on besides the model: shapes, dtypes, devices, plain values, autocast and DDP."""
    leaves, spec = private("tree_flatten")((args, kwargs))
    in_ddp = private("active_ddp")() is not None and (True, synchronises())
    return (present_state(), count_global_hooks(), in_ddp, str(spec), *map(_leaf_key, leaves))


def _leaf_key(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return (leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad)
    return leaf if isinstance(leaf, int | float | str | bool | None) else type(leaf)
