"""The training step that `FILE.py:FUNCTION` or `MODULE:FUNCTION` names: found, called, captured.

The function returns the model and its batch; it takes no argument, or the batch size. Everything here runs
code of the user's: what that prints goes to standard error, and what goes wrong in it is told in one
paragraph, with the lines of the user's own that it came through.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from ..console.call_fit import misfit, takes_by_name
from ..console.user_frames import own_lines, place, with_lines
from ..errors import CaptureError, LowtideError
from ..plans.planned_step import Plan

__all__ = [
    "UserStep",
    "capture_step",
    "found_step",
    "make_step",
    "names_a_step",
    "takes_a_size",
    "users_code",
]

NAMES = 8
"""The most functions of the user's own that an error lists."""


@dataclass(frozen=True)
class UserStep:
    """A model and its batch: the step is `model(*batch, **kwargs)`."""

    model: Callable[..., Any]
    batch: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


def names_a_step(source: str) -> bool:
    """Whether a source is `FILE.py:FUNCTION` or `MODULE:FUNCTION`, not a graph file."""
    place, _, name = source.rpartition(":")
    is_file = source == "-" or source.endswith(".json") or os.path.exists(source)
    return source.rstrip(":").endswith(".py") or (bool(place) and name.isidentifier() and not is_file)


@contextmanager
def found_step(named: str) -> Iterator[Callable[..., Any]]:
    """The function of that name; while it is used, imports find what lies beside its file."""
    if (file := named.rstrip(":")).endswith(".py"):
        raise LowtideError(f"{file} is a file: name its function, {_suggested(file)}")
    source, _, name = named.rpartition(":")
    if not source or not name:
        raise LowtideError(f"{named!r} is not of the form MODULE:FUNCTION or FILE.py:FUNCTION")
    if source.endswith(".py") and not os.path.isfile(source):
        raise CaptureError(f"there is no file {source!r}, seen from {os.getcwd()}")
    with _importable(source), redirect_stdout(sys.stderr), _quiet():
        with users_code(f"cannot import {source!r}"):
            module = _load(source)
        function = getattr(module, name, None)
        if not callable(function):
            raise CaptureError(f"{source!r} has no function {name!r}{_functions_of(module)}")
        yield function


def _functions_of(module: ModuleType) -> str:
    """The functions that a module has of its own, for who misspelt one."""
    found = [name for name, each in vars(module).items() if _is_own(each, module)]
    more = ["..."] if len(found) > NAMES else []
    return f"; it has {', '.join([*found[:NAMES], *more])}" if found else ""


def _is_own(each: Any, module: ModuleType) -> bool:
    return inspect.isfunction(each) and each.__module__ == module.__name__


def _suggested(path: str) -> str:
    """How to name a function of a file: one that is called after a step or needs no argument, if there is."""
    try:
        body = ast.parse(Path(path).read_text(encoding="utf-8")).body
    except (OSError, SyntaxError, ValueError):
        body = []
    found = [node for node in body if isinstance(node, ast.FunctionDef) and _needed(node) <= 1]
    found.sort(key=lambda node: ("step" not in node.name, _needed(node)))
    return f"as in {path}:{found[0].name if found else 'make_step'}"


def _needed(function: ast.FunctionDef) -> int:
    return len(function.args.args) - len(function.args.defaults)


def make_step(function: Callable[..., Any], size: int | None = None) -> UserStep:
    """The step that a function makes, of that batch size where one is given."""
    name = getattr(function, "__name__", "the function")
    if size is not None and not takes_a_size(function):
        raise CaptureError(
            f"{name}() takes no batch size. Let it take one and make a batch of that size, as in "
            f"def {name}(batch_size=8): return model, torch.empty(batch_size, ...)"
        )
    if size is None and misfit(function) is not None:
        raise CaptureError(
            f"{name}() needs an argument: give it a default, as in def {name}(batch_size=8), or call the "
            "verb with --batch-size"
        )
    shown = "" if size is None else str(size)
    with users_code(f"{name}({shown}) raised an error"):
        made = function() if size is None else function(size)
    return _read(made, name)


def takes_a_size(function: Callable[..., Any]) -> bool:
    """Whether a function can be called with one argument."""
    return misfit(function, 1) is None


def _read(made: Any, name: str) -> UserStep:
    """The step that a function's result stands for."""
    parts = made if isinstance(made, tuple) else ()
    match parts:
        case (model, tuple(batch), dict(kwargs)) if callable(model):
            _must_be_names(kwargs, name)
            return UserStep(model, batch, kwargs)
        case (model, Mapping() as batch) if callable(model) and takes_by_name(model, batch):
            return UserStep(model, (), dict(batch))
        case (model, (tuple() | list()) as batch) if callable(model) and _takes_unpacked(model, batch):
            return UserStep(model, tuple(batch))
        case (model, *batch) if callable(model):
            return UserStep(model, tuple(batch))
    found = f"({', '.join(type(part).__name__ for part in parts)})" if parts else type(made).__name__
    raise CaptureError(
        f"{name}() must return a tuple: model, *batch for a step model(*batch), model, {{batch}} for "
        f"model(**batch), or model, (batch...), {{kwargs}} for both; it returned {found}"
    )


def _must_be_names(kwargs: Mapping[Any, Any], name: str) -> None:
    if others := _not_names(kwargs):
        shown = ", ".join(map(repr, others[:NAMES]))
        raise CaptureError(
            f"the kwargs that {name}() returns are for model(*batch, **kwargs): their keys must be names, "
            f"not {shown}. A dict with such keys can be an argument itself: return model, batch"
        )


def _not_names(batch: Mapping[Any, Any]) -> list[Any]:
    return [key for key in batch if not isinstance(key, str)]


def _takes_unpacked(model: Callable[..., Any], batch: Sequence[Any]) -> bool:
    """Whether a tuple is the whole batch: the model takes its items, and not the tuple as one argument."""
    called = getattr(model, "forward", model)
    return misfit(called, *batch) is None and misfit(called, batch) is not None


def capture_step(
    step: UserStep,
    *,
    device: str | None = None,
    executor: str | None = None,
    optimizer: Any = None,
    step_in_backward: bool = False,
    ranks: int | None = None,
    **options: Any,
) -> Plan:
    """The plan of a step, which keeps everything unless the options, those of `plan`, have a budget.

    `optimizer` is a class of torch.optim, or its name.
    """
    from .api import plan

    options |= {"executor": executor} if executor else {}
    if optimizer is not None:
        options["optimizer"] = _optimizer(optimizer, step.model)
    if step_in_backward:
        options["step_in_backward"] = True
    with users_code("the step could not be captured"):
        return plan(step.model, *step.batch, kwargs=step.kwargs, device=device, ranks=ranks, **options)


def _optimizer(kind: Any, model: Callable[..., Any]) -> Any:
    import torch

    from ..measuring.trial import modules_of

    kinds = _optimizers(torch.optim)
    if not isinstance(kind, str | type) and not callable(kind):
        raise LowtideError(
            f"optimizer takes a class of torch.optim, or its name, not a {type(kind).__name__}"
        )
    name = kind if isinstance(kind, str) else getattr(kind, "__name__", repr(kind))
    if isinstance(kind, str) and kind not in kinds:
        raise LowtideError(f"optimizer {name!r} is not in torch.optim; choose one of {', '.join(kinds)}")
    parameters = [each for _, module in modules_of(model) for each in module.parameters()]
    if not parameters:
        raise LowtideError(f"optimizer {name}: the step's model has no parameters that could be found")
    with users_code(f"{name} cannot be made with its defaults"):
        return kinds.get(name, kind)(parameters)


def _optimizers(home: ModuleType) -> dict[str, Any]:
    kinds = {name: kind for name, kind in vars(home).items() if inspect.isclass(kind)}
    return {name: kind for name, kind in sorted(kinds.items()) if home.Optimizer in kind.__mro__[1:]}


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
def _quiet() -> Iterator[None]:
    """No log: torch logs the traceback of what is told in one paragraph, and the answer is the verb's."""
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


@contextmanager
def users_code(trouble: str) -> Iterator[None]:
    """Tell an error of the user's code in one paragraph, with the lines that it came through."""
    try:
        yield
    except LowtideError:
        raise
    except (Exception, SystemExit) as error:
        lines = own_lines(traceback.extract_tb(error.__traceback__))
        told = f"{trouble}: {type(error).__name__}: {error}{place(lines)}"
        raise with_lines(CaptureError(told), lines) from error
