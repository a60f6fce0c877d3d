"""Marks of a sketch in a step that Lowtide captures: two operators in place of what they stand for.

While Lowtide itself captures a step, a sketched layer leaves `lowtide::compress` in the forward and
`lowtide::weight_gradient` in the backward. The planner then replaces both, either by the exact product or by
the plain operators of the sketch (`marks`). In a graph that is run as it was captured, they do what they say.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from ..process_wide import here
from .choice import Choice
from .kinds import KINDS

__all__ = [
    "COMPRESS",
    "PLAIN",
    "WEIGHT_GRADIENT",
    "compress",
    "is_marked",
    "leaving_marks",
    "weight_gradient",
]


class _State(threading.local):
    on = False


_state = _State()


def leaving_marks() -> here:
    """Let the layers that a planner may choose for leave marks in what is captured meanwhile."""
    return here(_state, on=True)


def is_marked(choice: Choice) -> bool:
    """Whether a layer that is traced now leaves marks."""
    return not choice.always and torch.compiler.is_compiling() and _on()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _on() -> bool:
    return _state.on


def _compress(
    x: torch.Tensor, seed: torch.Tensor, kind: str, k: int, real: torch.Tensor | None
) -> list[torch.Tensor]:
    """What a kind keeps of x."""
    return list(KINDS[kind].compress(x, seed, k, real))


def _weight_gradient(
    g: torch.Tensor,
    kept: list[torch.Tensor],
    seed: torch.Tensor | None,
    kind: str,
    k: int,
    real: torch.Tensor | None,
) -> torch.Tensor:
    """The estimate of g^T x from what was kept of x."""
    return KINDS[kind].weight_gradient(g, tuple(kept), seed, k, real)  # type: ignore[arg-type]  # if unused


compress = torch.library.custom_op("lowtide::compress", _compress, mutates_args=())
compress.register_fake(_compress)
weight_gradient = torch.library.custom_op("lowtide::weight_gradient", _weight_gradient, mutates_args=())
weight_gradient.register_fake(_weight_gradient)

COMPRESS: Any = torch.ops.lowtide.compress.default
WEIGHT_GRADIENT: Any = torch.ops.lowtide.weight_gradient.default
PLAIN: dict[Any, Callable[..., Any]] = {COMPRESS: _compress, WEIGHT_GRADIENT: _weight_gradient}
"""What each of the two stands for, in plain operators."""
