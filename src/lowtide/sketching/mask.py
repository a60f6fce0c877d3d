"""Watching a model's calls: which rows of the present batch are real, and when a call begins and ends."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .._torch import private_of
from ..errors import LowtideError
from .scope import Scope

__all__ = ["Rows", "check_rows", "leave", "watch"]

Rows = str | Callable[..., torch.Tensor | None] | None
"""The argument of the model that holds the mask, or a function of its arguments that gives one."""


def check_rows(rows: Any, model: nn.Module) -> int | None:
    """The position of the argument that `rows` names; refuses what names none."""
    if rows is None or (callable(rows) and not isinstance(rows, str)):
        return None
    if not isinstance(rows, str):
        raise LowtideError(
            f"rows= takes the name of the model's argument that holds the mask, or a function of its "
            f"arguments, not a {type(rows).__name__}"
        )
    names = list(inspect.signature(model.forward).parameters)
    if rows not in names:
        raise LowtideError(f"the model has no argument {rows!r} for rows=; it has {', '.join(names)}")
    return names.index(rows)


def watch(model: nn.Module, scope: Scope, rows: Rows) -> None:
    """Tell a scope when the model is called, and with which mask."""
    model.register_forward_pre_hook(_Enter(scope, rows, check_rows(rows, model)), with_kwargs=True)
    model.register_forward_hook(_Leave(scope))


def leave(module: nn.Module) -> None:
    """Take the hooks of `watch` off a module."""
    for hooks, kind in (
        (private_of(module, "forward_pre_hooks"), _Enter),
        (private_of(module, "forward_hooks"), _Leave),
    ):
        for key in [key for key, hook in hooks.items() if isinstance(hook, kind)]:
            del hooks[key]
            private_of(module, "pre_hooks_with_kwargs").pop(key, None)


class _Enter:
    def __init__(self, scope: Scope, rows: Rows, position: int | None) -> None:
        self.scope, self.rows, self.position = scope, rows, position

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.scope.enter(self.mask(args, kwargs))

    def mask(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
        if self.rows is None:
            return None
        if not isinstance(self.rows, str):
            found = self.rows(*args, **kwargs)
        elif self.rows in kwargs:
            found = kwargs[self.rows]
        else:
            assert self.position is not None
            found = args[self.position] if self.position < len(args) else None
        if found is not None and not isinstance(found, torch.Tensor):
            raise LowtideError(f"rows= gave a {type(found).__name__} where a mask was expected")
        return None if found is None else found.detach() != 0


class _Leave:
    def __init__(self, scope: Scope) -> None:
        self.scope = scope

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.scope.leave()
