"""Whether a call fits what a function takes, asked without calling it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["misfit", "takes_by_name"]


def misfit(function: Callable[..., Any], /, *arguments: Any, **named: Any) -> str | None:
    """Why a function cannot be called so; None where it can, or does not tell what it takes."""
    try:
        inspect.signature(function).bind(*arguments, **named)
    except TypeError as error:
        return str(error)
    except ValueError:
        return None
    return None


def takes_by_name(model: Callable[..., Any], batch: Mapping[Any, Any]) -> bool:
    """Whether a dict can be a batch by name, as `transformers` has it, and not one argument."""
    named = all(isinstance(key, str) for key in batch)
    return named and misfit(getattr(model, "forward", model), **batch) is None
