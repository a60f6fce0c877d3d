"""A sketched model as a plan runs it: the layers that the plan chose keep a sketch, the others none."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from .layers import choice_of, is_sketched, shown

__all__ = ["as_planned", "weights_of"]

Modules = Sequence[tuple[str, nn.Module]]
"""Modules, each with what a plan may put in front of the names of its layers."""


@contextmanager
def as_planned(modules: Modules, sketched: Collection[str]) -> Iterator[bool]:
    """Let layers keep a sketch where they are named and only there, without a choice; gives if any is not."""
    chosen = set(_named(modules, sketched))
    able = {
        part: part in chosen
        for _, module in modules
        for part in module.modules()
        if is_sketched(part) and not choice_of(part).always
    }
    before = {part: part.forward for part in able}
    try:
        for part, named in able.items():
            if named:
                _always(part)
            else:
                del part.forward
        yield not all(able.values())
    finally:
        for part, forward in before.items():
            part.forward = forward  # type: ignore[method-assign]


def weights_of(modules: Modules, layers: Collection[str]) -> set[torch.Tensor]:
    """The weights of layers by their names."""
    return {part.weight for part in _named(modules, layers) if isinstance(part, nn.Linear)}


def _named(modules: Modules, layers: Collection[str]) -> Iterator[nn.Module]:
    for at, module in modules:
        for name, part in module.named_modules():
            if {shown(name), at + name} & {*layers}:
                yield part


def _always(part: nn.Module) -> None:
    made: functools.partial[Any] = part.__dict__["forward"]
    module, choice, *rest = made.args
    part.forward = functools.partial(made.func, module, replace(choice, always=True), *rest)  # type: ignore[method-assign]
