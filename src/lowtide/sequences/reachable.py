"""What can be reached from a cell, through modules, closures, defaults, bound objects and named globals."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from .._torch import private_of

__all__ = ["modes_of", "reachable"]


def reachable(cell: Any, *, depth: int = 4) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that can be reached from a cell, with names; parameters and buffers of modules included."""
    for name, thing in _found(cell, depth):
        if isinstance(thing, torch.Tensor):
            yield name or "a tensor", thing
        else:
            yield from ((_join(name, inner), tensor) for inner, tensor in thing.named_parameters())
            yield from ((_join(name, inner), tensor) for inner, tensor in thing.named_buffers())


def modes_of(cell: Any, *, depth: int = 4) -> tuple[bool, ...]:
    """Which of the modules that can be reached from a cell are in training."""
    modules = (thing for _, thing in _found(cell, depth) if isinstance(thing, nn.Module))
    return tuple(part.training for module in modules for part in module.modules())


def _found(cell: Any, depth: int) -> Iterator[tuple[str, torch.Tensor | nn.Module]]:
    seen: set[int] = set()
    todo: list[tuple[str, Any, int]] = [("", cell, depth)]
    while todo:
        name, thing, left = todo.pop()
        if id(thing) in seen or left < 0:
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor | nn.Module):
            yield name, thing
        else:
            todo += [(_join(name, inner), part, left - 1) for inner, part in _parts(thing)]


def _parts(thing: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(thing, functools.partial):
        return [("", thing.func), *_numbered(thing.args), *thing.keywords.items()]
    if isinstance(thing, list | tuple | set):
        return _numbered(thing)
    if isinstance(thing, dict):
        return [(str(key), part) for key, part in thing.items()]
    compiled = private_of(thing, "compiled_from", None)
    if compiled is not None:
        return [("", compiled)]
    owner = getattr(thing, "__self__", None)
    code = getattr(thing, "__code__", None)
    if owner is not None and not isinstance(owner, type):
        return [("", owner), ("", thing.__func__)] if hasattr(thing, "__func__") else [("", owner)]
    if code is not None:
        return _names_of(thing, code)
    attributes = getattr(thing, "__dict__", None)
    return attributes.items() if isinstance(attributes, dict) and _is_plain(thing) else ()


def _is_plain(thing: Any) -> bool:
    """Whether to look into an object: one that is called like a cell, not a module, class or library."""
    return callable(thing) and not isinstance(thing, type)


def _names_of(function: Any, code: Any) -> list[tuple[str, Any]]:
    cells = zip(code.co_freevars, function.__closure__ or (), strict=False)
    named = [(name, cell.cell_contents) for name, cell in cells if _filled(cell)]
    named += _numbered(function.__defaults__ or ())
    named += (function.__kwdefaults__ or {}).items()
    known = function.__globals__
    named += [
        (name, known[name]) for name in code.co_names if isinstance(known.get(name), torch.Tensor | nn.Module)
    ]
    return named


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # named in the code but not assigned yet
        return False


def _numbered(things: Iterable[Any]) -> list[tuple[str, Any]]:
    return [(str(number), thing) for number, thing in enumerate(things)]


def _join(*names: str) -> str:
    return ".".join(name for name in names if name)
