"""A sketched model as a plan runs it: the layers that the plan chose keep a sketch, the others none."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import nn

from .layers import choice_of, is_sketched, shown

__all__ = ["as_planned"]


@contextmanager
def as_planned(modules: Iterable[tuple[str, nn.Module]], sketched: Collection[str]) -> Iterator[bool]:
    """Let layers keep a sketch if and only if they are named, whatever a planner thinks; gives if any is not.

    Modules come with what a plan may put in front of the names of their layers.
    """
    able = {
        part: bool({shown(name), at + name} & {*sketched})
        for at, module in modules
        for name, part in module.named_modules()
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


def _always(part: nn.Module) -> None:
    made: functools.partial[Any] = part.__dict__["forward"]
    module, choice, *rest = made.args
    part.forward = functools.partial(made.func, module, replace(choice, always=True), *rest)  # type: ignore[method-assign]
