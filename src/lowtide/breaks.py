"""What torch's compiler raises, as users should see it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from ._torch import private
from .errors import CaptureError, GraphBreak, LowtideError

__all__ = ["clear_errors", "is_internal"]


@contextmanager
def clear_errors() -> Iterator[None]:
    """Show Lowtide's own errors as they are, and torch's graph breaks as the user's line."""
    try:
        yield
    except private("BackendCompilerFailed") as error:
        inner = error.inner_exception
        if isinstance(inner, LowtideError):
            raise inner.with_traceback(None) from None
        if type(inner).__name__ == "Captured":
            raise
        raise CaptureError(
            f"torch could not capture the step and its backward: {type(inner).__name__}: {_first_line(inner)}"
        ) from error
    except private("RecompileLimit") as error:
        raise CaptureError(
            "the step was captured again too often for the same shapes: something it reads changes at every "
            f"call (a Python number or flag, say). torch says: {_first_line(error)}"
        ) from error
    except private("DynamoError") as error:
        found = GraphBreak(_describe_break(error))
        found.may_be_users = any(sign in str(error) for sign in _SIGNS_OF_USERS_ERRORS)
        raise found from error


_SIGNS_OF_USERS_ERRORS = ("Observed exception", "when making fake tensor call", "failed to bind arguments")


def _describe_break(error: Any) -> str:
    stack = getattr(error, "real_stack", None) or []
    own = [frame for frame in stack if not is_internal(frame.filename)]
    where = f"{own[-1].filename}:{own[-1].lineno}: {own[-1].line}" if own else "an unknown line"
    return (
        f"the step is not one graph: torch cannot capture {where} ({_reason(error)}). "
        "A byte cap needs the whole step. Move that line out of the captured call, or cap the model with "
        "lowtide.cap(..., allow_breaks=True), which plans the pieces one by one."
    )


def _reason(error: Any) -> str:
    """Why torch stopped, where its first line is advice for its own developers, in words."""
    said = _first_line(error)
    if "data-dependent" in said:
        return "data-dependent branching: a plan is made before the values of tensors are known"
    if "RNN, GRU, or LSTM" in said:
        return f"{said}; lowtide.Recurrent caps such a layer"
    return said


def _first_line(error: Any) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


@lru_cache(maxsize=1 << 10)
def is_internal(path: str) -> bool:
    """Whether a file is torch's or Lowtide's own machinery; the demonstration's model is a user's."""
    if Path(path) == Path(__file__).with_name("demo.py"):
        return False
    roots = (Path(torch.__file__).parent, Path(__file__).parent)
    return any(Path(path).is_relative_to(root) for root in roots)
