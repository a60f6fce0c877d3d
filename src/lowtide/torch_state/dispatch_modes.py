"""Dispatch modes, which see every operator: our own, and those that somebody else has put on.

torch.compile silently runs a function uncompiled under a dispatch mode that it does not know. So modes are
taken off while torch looks up or makes the compiled step, and put back while the step itself runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .._torch import private

__all__ = ["in_place_of_operators", "with_foreign_modes", "without_foreign_modes"]

_foreign = threading.local()


class _Own:
    """Marks modes of our own."""


def in_place_of_operators(call: Callable[[Callable[..., Any], Any, Any], Any]) -> Any:
    """A mode under which `call(operator, args, kwargs)` stands for every operator, compiled steps too."""

    class Mode(_Own, private("TorchDispatchMode")):  # type: ignore[misc]
        supports_higher_order_operators = True

        @classmethod
        def ignore_compile_internals(cls) -> bool:
            return True

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return call(func, args, kwargs or {})

    return Mode()


@contextmanager
def without_foreign_modes(*, ours: bool = True) -> Iterator[None]:
    """Take dispatch modes off while torch looks up or makes the compiled step.

    Of a step in pieces our own stay on (not `ours`): they see what runs between the pieces, and torch runs
    compiled functions under them.
    """
    if not private("count_modes")():
        yield
        return
    with private("without_modes")() as modes:
        stay = [mode for mode in modes or () if isinstance(mode, _Own) and not ours]
        outer, _foreign.modes = getattr(_foreign, "modes", ()), [m for m in modes or () if m not in stay]
        for mode in stay:
            private("push_mode")(mode)
        try:
            yield
        finally:
            for _ in stay:
                private("pop_mode")()
            _foreign.modes = outer


def with_foreign_modes(run: Callable[..., Any]) -> Callable[..., Any]:
    """Put the modes back while the step itself runs, so that they see its operators."""

    def call(*args: Any) -> Any:
        modes, _foreign.modes = getattr(_foreign, "modes", ()), ()
        if not modes:
            return run(*args)
        try:
            for mode in modes:
                private("push_mode")(mode)
            return run(*args)
        finally:
            for _ in modes:
                private("pop_mode")()
            _foreign.modes = modes

    return call
