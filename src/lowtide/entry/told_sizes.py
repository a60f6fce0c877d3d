"""Which sizes of a step are said to change: by `dynamic=`, or by marks that torch leaves on tensors.

`dynamic={"input_ids": 1}` names an argument of the step, or a key of a dict among them, and one dimension or
several; a number stands for a positional argument. `torch._dynamo.mark_dynamic(tensor, 1)` says the same of a
tensor at hand. What is said so is a symbol from the first capture on, and needs no second shape to be seen.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from .._torch import marked_sizes
from ..errors import LowtideError
from ..pipeline.compiled_calls import tensors_of_call

__all__ = ["told_sizes"]

Dynamic = Mapping[str | int, Any] | bool | None


def told_sizes(
    dynamic: Dynamic, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[set[int]]:
    """For each tensor of a call the dimensions that are said to change."""
    tensors = tensors_of_call(args, kwargs)
    found = list(map(marked_sizes, tensors))
    if not isinstance(dynamic, Mapping):
        return found
    for name in dynamic:
        tensor = _argument(name, dynamic, function, args, kwargs)
        for each, dimensions in zip(tensors, found, strict=True):
            if each is tensor:
                dimensions |= _dimensions(name, dynamic, tensor)
    return found


def _dimensions(name: str | int, dynamic: Mapping[str | int, Any], tensor: torch.Tensor) -> set[int]:
    dimensions = dynamic[name]
    listed = [dimensions] if isinstance(dimensions, int) else list(dimensions)
    over = [each for each in listed if not -tensor.dim() <= each < tensor.dim()]
    if over:
        raise LowtideError(
            f"dynamic={dynamic}: {name!r} has the shape {tuple(tensor.shape)}, and no dimension {over[0]}"
        )
    return {each % tensor.dim() for each in listed}


def _argument(
    name: str | int,
    dynamic: Mapping[str | int, Any],
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> torch.Tensor | None:
    """The tensor of that name; None where the step takes one that this call was not given."""
    given = dict(_given(function, args, kwargs))
    if name not in given:
        if name in _parameters(function):
            return None
        raise LowtideError(
            f"dynamic={dynamic}: this call has no argument {name!r}; it has {', '.join(map(repr, given))}"
        )
    value = given[name]
    if value is None:
        return None
    if not isinstance(value, torch.Tensor):
        raise LowtideError(
            f"dynamic={dynamic}: {name!r} is a {type(value).__name__} and no tensor; name a key of a dict, "
            "or mark tensors by torch._dynamo.mark_dynamic(tensor, dimension)"
        )
    return value


def _given(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[str | int, Any]]:
    """What a call is given, by position, by key of a dict, and by name."""
    yield from enumerate(args)
    for value in (*args, *kwargs.values()):
        if isinstance(value, Mapping):
            yield from ((key, each) for key, each in value.items() if isinstance(key, str))
    yield from zip(_parameters(function), args, strict=False)
    yield from kwargs.items()


def _parameters(function: Callable[..., Any]) -> list[str]:
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # of what is written in C, nothing is known
        return []
