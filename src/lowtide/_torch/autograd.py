"""What autograd, AOTAutograd and autocast say of a step."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

from .names import private


def place_of(node: Any) -> tuple[int, tuple[str, ...]] | None:
    """Which input of a captured step a placeholder stands for, and the attributes that lead to it there.

    None for what torch adds, and where it merged some (the descriptors of `meta["desc"]`, seen in 2.11-2.13).
    """
    path: list[str] = []
    described = node.meta.get("desc")
    while hasattr(described, "base") and hasattr(described, "attr"):
        path.insert(0, described.attr)
        described = described.base
    return (described.idx, tuple(path)) if type(described).__name__ == "PlainAOTInput" else None


def in_backward() -> bool:
    """Whether a backward is going on in this thread; while a step is traced, none is."""
    return not torch.compiler.is_compiling() and private("graph_task")() != -1


def autocast_knows(operator: str, kind: str) -> bool:
    """Whether autocast has a rule for an operator on a kind of device: what it calls is then not cast."""
    try:
        return bool(private("has_kernel")(f"aten::{operator}", f"Autocast{kind.upper()}"))
    except RuntimeError:  # there is no operator of that name
        return False


def boxed(function: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Mark a function that takes its arguments as one list and empties it (seen in 2.11-2.13)."""
    function._boxed_call = True  # type: ignore[attr-defined]
    return function


def count_global_hooks() -> int:
    """How many hooks are on all modules (`_global_forward_hooks` and its kin, seen in 2.11-2.13)."""
    return sum(map(len, _global_hooks()))


@functools.cache
def _global_hooks() -> list[Any]:
    module = importlib.import_module("torch.nn.modules.module")
    kinds = ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")
    return [getattr(module, f"_global_{kind}") for kind in kinds]


def frees_tangents() -> bool:
    """Whether autograd lets go of the incoming gradients of a node while it runs (new in 2.13)."""
    return hasattr(torch.autograd.Function, "boxed_grads_call")


def edges_of(node: Any) -> tuple[Any, ...]:
    """What one of autograd's nodes gives gradients to.

    Nothing, where torch 2.11 has let go of the node of a Function with its result: `next_functions` raises.
    """
    try:
        return tuple(node.next_functions)
    except RuntimeError:
        return ()


def when_backward_ends(call: Callable[[], None]) -> None:
    """Have a function called when the present backward has ended without an error (seen in 2.11-2.13)."""
    torch.autograd.Variable._execution_engine.queue_callback(call)
