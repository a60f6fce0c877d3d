"""Calls that torch.compile captures: which of them are alike, and a code object of its own for each.

What torch's front end is told of a capture is process-wide. It is set while it captures, by one thread at a
time, and not at the calls of what is captured already.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from .._torch import (
    calls_unnamed,
    capture_settings,
    compiled,
    count_global_hooks,
    guards_untimed,
    has_marks,
    metrics_without_settings,
    private,
    rules_as_plain,
    settings_kept,
    sizes_marked,
)
from ..capture.averaged_norms import averages_traced
from ..capture.awaited import synchronises
from ..capture.branches import answering_branches
from ..capture.nested_encoders import encoders_as_plain
from ..process_wide import nothing_left
from ..torch_state.autocast_state import present_state

__all__ = ["captured", "key_but_for_sizes", "key_of", "tensors_of_call", "unmarked"]


def captured(
    function: Callable[..., Any],
    backend: Callable[..., Any],
    *,
    fullgraph: bool = True,
    recurrent: bool = False,
) -> Callable[..., Any]:
    """A function that torch's front end captures for a backend, apart from all others.

    Where `recurrent` layers can be captured as they run, it looks into them.
    """
    around = partial(_around_a_capture, recurrent)
    return compiled(_fresh(function), backend, fullgraph=fullgraph, around=around)


@contextmanager
def _around_a_capture(recurrent: bool) -> Iterator[None]:
    with (
        private("without_modes")(),  # those that look at what runs between the pieces of a step
        settings_kept(),
        nothing_left(),
        capture_settings(recurrent=recurrent),
        metrics_without_settings(),
        calls_unnamed(),
        guards_untimed(),
        answering_branches(),
        rules_as_plain(),
        encoders_as_plain(),
        averages_traced(),
    ):
        yield


def _fresh(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same call behind a code object of its own."""

    def step(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return types.FunctionType(
        step.__code__.replace(), step.__globals__, step.__name__, step.__defaults__, step.__closure__
    )


def key_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """What a plan depends on besides the model: shapes, dtypes, devices, plain values, autocast and DDP."""
    return _key(args, kwargs, _sizes)


def key_but_for_sizes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The same for all sizes of the tensors."""
    return _key(args, kwargs, _dimensions)


def tensors_of_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors among the arguments of a call."""
    return [leaf for leaf in private("tree_leaves")((args, kwargs)) if isinstance(leaf, torch.Tensor)]


def unmarked(args: tuple[Any, ...], kwargs: dict[str, Any]) -> AbstractContextManager[Any]:
    """Let torch's front end see no marks on the tensors of a call, which it would make symbols of."""
    marked = [(tensor, set[int]()) for tensor in tensors_of_call(args, kwargs) if has_marks(tensor)]
    return sizes_marked(marked) if marked else nullcontext()


def _key(args: tuple[Any, ...], kwargs: dict[str, Any], sizes: Callable[[Any], Any]) -> tuple[Any, ...]:
    leaves, spec = private("tree_flatten")((args, kwargs))
    in_ddp = private("active_ddp")() is not None and (True, synchronises())
    return (
        present_state(),
        count_global_hooks(),
        in_ddp,
        str(spec),
        *(_leaf_key(leaf, sizes) for leaf in leaves),
    )


def _leaf_key(leaf: Any, sizes: Callable[[Any], Any]) -> Any:
    if isinstance(leaf, torch.Tensor):
        return (sizes(leaf), leaf.dtype, leaf.device, leaf.requires_grad)
    return leaf if isinstance(leaf, int | float | str | bool | None) else type(leaf)


def _sizes(tensor: torch.Tensor) -> Any:
    return tensor.shape, tensor.stride()


def _dimensions(tensor: torch.Tensor) -> Any:
    return tensor.dim()
