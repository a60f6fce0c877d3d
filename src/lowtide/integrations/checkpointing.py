"""Gradient checkpointing as models of transformers and PEFT have it, put aside while a plan is in force.

Both decide what to recompute, and a checkpointed layer inside of a captured step is one that the plan may not
touch. Reentrant checkpointing needs an input that requires gradients; for that, transformers and PEFT hang
hooks on the embeddings that call `requires_grad_()`, which nothing else needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .._torch import private_of

__all__ = ["without_checkpointing"]

_HOOKS = ("make_inputs_require_grads", "make_inputs_require_grad")
"""The names of those hooks: of transformers, of PEFT."""


@contextmanager
def without_checkpointing(model: torch.nn.Module) -> Iterator[bool]:
    """Switch gradient checkpointing off, take its hooks away, and put both back; gives whether it was on."""
    layers = [part for part in model.modules() if getattr(part, "gradient_checkpointing", False) is True]
    taken = [(part, hooks) for part in model.modules() if (hooks := _hooks_of(part))]
    _switch(layers, on=False)
    for part, hooks in taken:
        for key in hooks:
            del private_of(part, "forward_hooks")[key]
    try:
        yield bool(layers)
    finally:
        _switch(layers, on=True)
        for part, hooks in taken:
            _put_first(private_of(part, "forward_hooks"), hooks)


def _hooks_of(part: torch.nn.Module) -> dict[int, Any]:
    hooks = private_of(part, "forward_hooks")
    return {key: hook for key, hook in hooks.items() if getattr(hook, "__name__", "") in _HOOKS}


def _switch(layers: list[torch.nn.Module], *, on: bool) -> None:
    for layer in layers:
        layer.gradient_checkpointing = on  # type: ignore[assignment]  # a flag, not a tensor


def _put_first(hooks: dict[int, Any], others: dict[int, Any]) -> None:
    """Put hooks back before those that are there: the order in which they run."""
    later = dict(hooks)
    hooks.clear()
    hooks.update({**others, **later})
