"""A sketched model as a plan runs it: only the layers that the plan chose keep a sketch."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager

from torch import nn

from .layers import choice_of, is_sketched, shown

__all__ = ["as_planned"]


@contextmanager
def as_planned(modules: Iterable[tuple[str, nn.Module]], sketched: Collection[str]) -> Iterator[bool]:
    """Let layers that a plan keeps exact run plainly meanwhile; gives whether there are any.

    Modules come with what a plan may put in front of the names of their layers.
    """
    names = {re.sub(r" \(\d+\)$", "", name) for name in sketched}
    exact = {
        part: part.forward
        for at, module in modules
        for name, part in module.named_modules()
        if is_sketched(part) and not choice_of(part).always and not {shown(name), at + name} & names
    }
    try:
        for part in exact:
            del part.forward
        yield bool(exact)
    finally:
        for part, forward in exact.items():
            part.forward = forward  # type: ignore[method-assign]
