"""Calls with a `generator=` in what torch.compile's front end traces.

The front end has no way to hand a `torch.Generator` to a call in its graph. Here the graph gets a function
that holds the generator, in the place of the call.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import fx

from ..process_wide import here
from .names import private

__all__ = ["drawn_from", "generators_traced", "may_be_arguments", "with_generator"]

_SIGN = "a generator of lowtide's "


class _Here(threading.local):
    known: dict[str, torch.Generator] | None = None


_here = _Here()
_numbers = itertools.count()


def generators_traced() -> AbstractContextManager[Any]:
    """Let calls have a generator of their own, in what this thread traces; torch 2.11 breaks graphs there."""
    if not may_be_arguments():
        return nullcontext()
    _let_generators_be_arguments()
    return here(_here, known={})


@functools.cache
def may_be_arguments() -> bool:
    """Whether a traced graph takes a generator as an argument of a call: in torch 2.13, not in 2.11."""
    tracer = fx.Tracer()
    tracer.root, tracer.graph, tracer.tensor_attrs = torch.nn.Module(), fx.Graph(), {}
    try:
        tracer.create_arg(torch.Generator())
    except NotImplementedError:
        return False
    return True


@functools.cache
def _let_generators_be_arguments() -> None:
    """Let a sign stand for a generator among the arguments of a call, once and for good (seen in 2.13)."""
    traced = private("TracedObject")
    own = traced.as_proxy

    def as_proxy(self: Any) -> Any:
        if _here.known is None or type(self.value) is not torch.Generator or self.source is None:
            return own(self)
        if private("Tracer").current_tx().output.current_tracer.parent is not None:
            return own(self)  # in a part that is traced apart calls are not looked at
        private("install_guard")(self.source.make_guard(private("GuardBuilder").ID_MATCH))
        sign = f"{_SIGN}{next(_numbers)}"
        _here.known[sign] = self.value
        return sign

    traced.as_proxy = as_proxy


def with_generator(node: fx.Node) -> None:
    """Put a function that holds the generator in the place of a call that has a sign for it."""
    sign = node.kwargs.get("generator")
    if not isinstance(sign, str) or not sign.startswith(_SIGN) or _here.known is None:
        return
    generator, name = _here.known[sign], node.target
    function: Callable[..., Any] = node.target if callable(node.target) else getattr(torch.Tensor, str(name))

    def draw_from(*args: Any, **kwargs: Any) -> Any:
        return function(*args, generator=generator, **kwargs)

    draw_from.generator = generator  # type: ignore[attr-defined]
    draw_from.instead_of = name  # type: ignore[attr-defined]
    node.op, node.target = "call_function", draw_from
    node.kwargs = {key: value for key, value in node.kwargs.items() if key != "generator"}


def drawn_from(node: fx.Node) -> torch.Generator | None:
    """The generator of its own that a call of a trace draws from; None for most."""
    return getattr(node.target, "generator", None) if callable(node.target) else None
