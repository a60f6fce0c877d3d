"""The fused head of trl's trainers: log-probabilities of the labels, without the logits.

It is a `torch.autograd.Function` that multiplies into a slice of a buffer (`torch.mm(..., out=tile)`), which
torch.compile's front end refuses. AOTAutograd traces it well. So, while a plan is in force, a function that
torch puts into the graph as it is stands in its place. On a GPU it otherwise picks the labelled positions,
whose number no plan can know, and runs kernels of Triton; in a plan it runs over all positions, by torch's
operators, as it does on other devices.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, cast
from unittest.mock import patch

import torch

__all__ = ["capturable_head", "has_fused_head"]

_HOMES = ("trl.trainer.utils", "trl.kernels.chunked_logprob")
_FUNCTION = "_ChunkedLogProbFunction"
_CHOICE = "_use_triton"


def has_fused_head(arguments: Any) -> bool:
    """Whether these are the arguments of one of trl's trainers."""
    return any(kind.__module__.partition(".")[0] == "trl" for kind in type(arguments).__mro__)


@contextmanager
def capturable_head() -> Iterator[None]:
    """Let trl's fused head be one that torch can capture; nothing where trl is not loaded or has none."""
    with ExitStack() as undo:
        for home in [sys.modules[name] for name in _HOMES if name in sys.modules]:
            if (function := getattr(home, _FUNCTION, None)) is not None:
                undo.enter_context(patch.object(home, _FUNCTION, _InGraph(function)))
            if hasattr(home, _CHOICE):
                undo.enter_context(patch.object(home, _CHOICE, lambda device: False))
        yield


class _InGraph:
    """Stands for a `torch.autograd.Function`: what it computes is traced below torch.compile's front end."""

    def __init__(self, function: Any) -> None:
        self.apply = _in_graph(function)


@cache
def _in_graph(function: Any) -> Callable[..., Any]:
    names = list(inspect.signature(function.forward).parameters)[1:]

    @torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
    def apply(*arguments: Any) -> Any:
        return function.apply(*_no_wider_than_the_head(dict(zip(names, arguments, strict=False))))

    return cast("Callable[..., Any]", apply)


def _no_wider_than_the_head(arguments: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments with a buffer no wider than the vocabulary: a plan counts all of it, touched or not."""
    if {"weight", "chunk_size"} <= arguments.keys():
        arguments["chunk_size"] = min(arguments["chunk_size"], arguments["weight"].shape[0])
    return tuple(arguments.values())
