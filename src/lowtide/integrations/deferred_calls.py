"""Calls that a captured step leaves for later: what it logs, and the metrics that it updates.

torch cannot capture them. While a step is captured and run, a stand-in in the place of each method notes the
call, and the tensors in it become outputs of the step; afterwards the real methods are called with them, in
the same order. What such a call returns is not known before: a step may log or return it, and no more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .._torch import private

__all__ = ["DeferredCalls"]

_map_only = private("tree_map_only")


class Later:
    """Stands for what a call that is left for later will return."""

    def __init__(self, place: int) -> None:
        self.place = place


class DeferredCalls:
    """The calls of some methods, in the order in which a step makes them."""

    def __init__(self) -> None:
        self.noted: list[Any] = []
        self.stand_ins: list[tuple[Any, str, Callable[..., Any]]] = []

    def leave(self, owner: Any, *methods: str, copied: bool) -> None:
        """Leave the calls of an object's methods for later; tensors in them are copied, or detached only."""
        for method in methods:
            self.stand_ins.append((owner, method, _stand_in(self.noted, owner, method, copied=copied)))

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Put the stand-ins in place for a while, past what a class does when an attribute is set."""
        before = [(vars(owner), name, vars(owner).get(name)) for owner, name, _ in self.stand_ins]
        for owner, name, stand_in in self.stand_ins:
            vars(owner)[name] = stand_in
        try:
            yield
        finally:
            for attributes, name, value in before:
                if value is None:
                    del attributes[name]
                else:
                    attributes[name] = value

    def call(self, output: Any, noted: list[Any]) -> Any:
        """Call what was left for later, and give the output with what these calls return."""
        results: list[Any] = []

        def known(tree: Any) -> Any:
            return _map_only(Later, lambda later: results[later.place], tree)

        for owner, method, args, kwargs in noted:
            called = owner if method == "forward" else getattr(owner, method)
            results.append(called(*known(args), **known(kwargs)))
        return known(output)


def _stand_in(noted: list[Any], owner: Any, method: str, *, copied: bool) -> Callable[..., Any]:
    def note(*args: Any, **kwargs: Any) -> Later:  # traced by torch: plain Python over lists and dicts
        later = Later(len(noted))
        as_it_is = copied and kwargs.get(
            "enable_graph", False
        )  # Lightning's word for a value to differentiate
        if not as_it_is:
            args = tuple([_of_now(value, copied=copied) for value in args])
            kwargs = {name: _of_now(value, copied=copied) for name, value in kwargs.items()}
        noted.append((owner, method, args, kwargs))
        return later

    return note


def _of_now(value: Any, *, copied: bool) -> Any:
    """A value as it is now and outside of the autograd graph."""
    if isinstance(value, dict):
        return {name: _of_now(item, copied=copied) for name, item in value.items()}
    if isinstance(value, list):
        return [_of_now(item, copied=copied) for item in value]
    if type(value) is tuple:
        return tuple([_of_now(item, copied=copied) for item in value])
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone() if copied else value.detach()
