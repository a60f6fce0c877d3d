"""Full backward hooks of modules in what torch.compile's front end traces.

The front end stops at them unless compiled autograd is to run the backward. Here it leaves torch's own object
of hooks in the graph, which calls them where autograd meets the module; what calls the user's hooks is the
capturing thread's to say.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils.hooks import BackwardHook

from ..process_wide import here
from .names import private

Make = Callable[[torch.nn.Module], Callable[[], BackwardHook]]
"""What makes the object of hooks of a module in each run of a trace."""


class _Here(threading.local):
    make: Make | None = None


_here = _Here()


def module_hooks_traced(make: Make) -> AbstractContextManager[Any]:
    """Trace modules with hooks on their backward, in this thread."""
    _let_hooks_be_inside()
    return here(_here, make=make)


@functools.cache
def _let_hooks_be_inside() -> None:
    """Ask the present thread what to do with hooks, once and for good (`create`, seen in 2.13)."""
    traced = private("TracedHooks")
    refuse = traced.create

    def create(tracer: Any, module: Any, *hooks: Any) -> Any:
        if _here.make is None or tracer.output.current_tracer.parent is not None:
            return refuse(tracer, module, *hooks)
        for part in (module, *(hook for variable in hooks for hook in variable.items)):
            if part.source is not None:  # another one is another step
                private("install_guard")(part.source.make_guard(private("GuardBuilder").ID_MATCH))
        proxy = tracer.output.create_proxy("call_function", _here.make(module.value), (), {})
        proxy.node.meta["example_value"] = BackwardHook(None, (), ())
        return _inside()(proxy, module, *hooks)

    traced.create = staticmethod(create)


@functools.cache
def _inside() -> Any:
    """The class of traced hooks that pass over what is no tensor among a module's arguments and results."""

    class Inside(private("TracedHooks")):  # type: ignore[misc]
        def _setup_hook(self, tracer: Any, name: str, given: Any) -> Any:
            several = isinstance(given, private("TracedTuple"))
            items = list(given.items) if several else [given]
            places = [place for place, item in enumerate(items) if isinstance(item, private("TracedTensor"))]
            if not places or (not several and not given.is_tensor()):
                return given
            tensors = [items[place].as_proxy() for place in places]
            function = _into if name == "setup_input_hook" else _out_of
            call = tracer.output.create_proxy(
                "call_function", function, (self.as_proxy(), tuple(places), len(items), tensors), {}
            )
            made = private("wrap_traced")(tracer, call).items
            for place, item in zip(places, made, strict=True):
                items[place] = item
            return given.clone(items=items, source=None) if several else items[0]

    return Inside


def _into(hook: BackwardHook, places: tuple[int, ...], count: int, tensors: list[torch.Tensor]) -> Any:
    return _around(hook.setup_input_hook, places, count, tensors)


def _out_of(hook: BackwardHook, places: tuple[int, ...], count: int, tensors: list[torch.Tensor]) -> Any:
    return _around(hook.setup_output_hook, places, count, tensors)


def _around(
    set_up: Callable[[Any], Any], places: tuple[int, ...], count: int, tensors: list[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """What a module is given or returns, as autograd's node that calls hooks gives it back."""
    given: list[Any] = [None] * count
    for place, tensor in zip(places, tensors, strict=True):
        given[place] = tensor
    made = set_up(tuple(given))
    return tuple(made[place] for place in places)
