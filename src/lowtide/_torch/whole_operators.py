"""Operators that torch's front end takes apart, traced whole: their parts, one by one, round otherwise.

It does so where a factor may be a tensor, which the operator would bring to the host. A number is none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from .names import private

_TAKEN_APART = {"method_add_": "alpha", "method_addcmul_": "value", "method_addcdiv_": "value"}
"""The functions that do so, with the factor's name (`add_` in 2.11, the others in 2.11-2.13)."""


@functools.cache
def let_operators_be_whole(captures: Callable[[], bool]) -> None:
    """Keep operators with a number as their factor as they are, once and for good.

    `captures` says whether the present thread captures for Lowtide.
    """
    traced = private("TracedTensor")
    for name, factor in _TAKEN_APART.items():
        if (apart := getattr(traced, name, None)) is not None:
            setattr(traced, name, _whole(apart, factor, captures))
    handlers = private("TorchFunction")._get_handlers()  # cached by torch, seen in 2.11-2.13
    if (apart := handlers.get(torch.addcdiv)) is not None:
        handlers[torch.addcdiv] = _whole(apart, "value", captures)


def _whole(apart: Callable[..., Any], factor: str, captures: Callable[[], bool]) -> Callable[..., Any]:
    """The function that takes an operator apart; for a number None, by which the operator is traced."""

    @functools.wraps(apart)
    def trace(variable: Any, tracer: Any, *args: Any, **kwargs: Any) -> Any:
        if captures() and isinstance(kwargs.get(factor), private("TracedConstant")):
            return None
        return apart(variable, tracer, *args, **kwargs)

    return trace
