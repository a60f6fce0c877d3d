"""Whether a call fits what a function takes, asked without calling it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

__all__ = ["misfit"]


def misfit(function: Callable[..., Any], /, *arguments: Any, **named: Any) -> str | None:
    """Why a function cannot be called so; None where it can, or does not tell what it takes."""
    try:
        inspect.signature(function).bind(*arguments, **named)
    except TypeError as error:
        return str(error)
    except ValueError:
        return None
    return None
