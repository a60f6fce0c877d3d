"""The training step that `MODULE:FUNCTION` names: found, called, captured.

The function takes no arguments and returns the model and its batch. Everything here runs code of the user's;
what goes wrong in it is told in one paragraph, with the user's own line that it came from. Only the capture
itself loads torch.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from .errors import CaptureError, GraphBreak, LowtideError
from .plan import Plan

__all__ = ["Step", "capture_step"]


@dataclass(frozen=True)
class Step:
    """A model and its batch: the step is `model(*batch, **kwargs)`."""

    model: Callable[..., Any]
    batch: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


def capture_step(named: str, device: str | None) -> Plan:
    """The plan that keeps everything of the step that `MODULE:FUNCTION` or `FILE.py:FUNCTION` names."""
    from .devices import find_device

    if device is not None:
        find_device(device)
    source, _, name = named.rpartition(":")
    if not source or not name:
        raise LowtideError(f"{named!r} is not of the form MODULE:FUNCTION or FILE.py:FUNCTION")
    with _importable(source):  # also while the step is captured: the model may import only then
        return _capture(_call(source, name), device)


def _call(source: str, name: str) -> Step:
    with _users_code(f"cannot import {source!r}"):
        function = getattr(_load(source), name, None)
    if not callable(function):
        raise CaptureError(f"{source!r} has no function {name!r}")
    with _users_code(f"{name}() raised an error"):
        made = function()
    return _read(made, name)


def _read(made: Any, name: str) -> Step:
    """The step that a function's result stands for."""
    parts = made if isinstance(made, tuple) else ()
    match parts:
        case (model, tuple(batch), dict(kwargs)) if callable(model):
            return Step(model, batch, kwargs)
        case (model, *batch) if callable(model):
            return Step(model, tuple(batch))
    found = f"({', '.join(type(part).__name__ for part in parts)})" if parts else type(made).__name__
    raise CaptureError(
        f"{name}() must return a tuple: model, *batch for a step model(*batch), or model, (batch...), "
        f"{{kwargs}} for model(*batch, **kwargs); it returned {found}"
    )


def _capture(step: Step, device: str | None) -> Plan:
    from .api import plan

    logging.disable(logging.ERROR)  # torch logs the traceback of what is told in one paragraph
    try:
        with _users_code("the step could not be captured"):
            return plan(step.model, *step.batch, kwargs=step.kwargs, device=device)
    finally:
        logging.disable(logging.NOTSET)


def _load(source: str) -> ModuleType:
    """A module by its name, or a file as a module of its own."""
    if not source.endswith(".py"):
        return importlib.import_module(source)
    path = Path(source)
    name = f"lowtide_capture_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextmanager
def _importable(source: str) -> Iterator[None]:
    """Imports find what lies beside the file, or in the current folder."""
    folder = str(Path(source).resolve().parent) if source.endswith(".py") else os.getcwd()
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        if folder in sys.path:
            sys.path.remove(folder)


@contextmanager
def _users_code(trouble: str) -> Iterator[None]:
    """Tell an error of the user's code in one paragraph, with the line that it came from."""
    try:
        yield
    except GraphBreak as error:
        said = re.search(r"(?:got|raised exception) (\w+\(.*\))", str(error.__cause__))
        if not error.may_be_users or said is None:
            raise
        where = _last_line(getattr(error.__cause__, "real_stack", None) or ())
        raise CaptureError(f"the step itself seems to raise an error: {said[1]}{where}") from error
    except LowtideError:
        raise
    except (Exception, SystemExit) as error:
        where = _last_line(traceback.extract_tb(error.__traceback__))
        raise CaptureError(f"{trouble}: {type(error).__name__}: {error}{where}") from error


def _last_line(stack: Iterable[traceback.FrameSummary]) -> str:
    """The last line of a stack that is the user's own."""
    from .breaks import is_internal

    own = [frame for frame in stack if not is_internal(frame.filename) and "<frozen" not in frame.filename]
    return f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
