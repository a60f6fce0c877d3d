"""A cap on a module: where it stands, and how it is seen by what goes past a module's call.

torch calls a module by what is in `_compiled_call_impl`. Two roads lead past it: `model.compile()` puts
something else there, and torch.compile around a model traces its `forward` without a look at it. So a capped
module also has a `compile` of its own, which refuses, and a `__call__` of its own, which Python never uses,
but at whose sight torch.compile takes the long road: it breaks its graph at the capped module, which runs as
planned (seen in torch 2.11-2.13). Class, forward, hooks and state_dict are as they were; deep copies and
pickles have their class's methods. A shallow copy shares these with the capped module.
"""

from __future__ import annotations

import types
from typing import Any

import torch

from .._torch import private_of, set_private
from ..errors import LowtideError
from .capped import Capped
from .wrappers import called_by

__all__ = ["capped_of", "put", "remove", "replaced"]


def put(model: torch.nn.Module, capped: Capped) -> None:
    """Let the calls of a module go to its cap."""
    remove(model)
    set_private(model, "compiled_call", capped)
    model.__lowtide__ = capped  # type: ignore[assignment]  # copies leave out the other, and this one says so
    for method in _METHODS:
        vars(model).setdefault(method.__name__, types.MethodType(method, model))


def remove(model: torch.nn.Module) -> None:
    """Let a module be as it was before its cap."""
    set_private(model, "compiled_call", None)
    for name in ("__lowtide__", *(method.__name__ for method in _METHODS)):
        found = vars(model).get(name)
        if isinstance(found, Capped) or getattr(found, "__func__", None) in _METHODS:
            del vars(model)[name]


def capped_of(model: Any) -> Capped | None:
    """The cap in force on a module or a function, None where there is none."""
    model = called_by(model)
    if not isinstance(model, torch.nn.Module):
        found = getattr(model, "__lowtide__", None)
        return found if isinstance(found, Capped) else None
    called = private_of(model, "compiled_call")
    if called is not None and replaced(model) is not None:
        raise LowtideError(
            "this model was capped and then compiled in place, which took the place of the cap: it runs "
            'without one. lowtide.uncap(model) undoes both; cap it with executor="inductor" for fused kernels'
        )
    return called if isinstance(called, Capped) else None


def replaced(model: Any) -> Capped | None:
    """The cap whose place something else has taken, as `torch.nn.Module.compile` does."""
    model = called_by(model)
    if not isinstance(model, torch.nn.Module):
        return None
    capped = vars(model).get("__lowtide__")
    if not isinstance(capped, Capped) or capped.module is not model:
        return None
    return None if private_of(model, "compiled_call") is capped else capped


def __call__(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807  # a method of that name
    return type(self).__call__(self, *args, **kwargs)


def compile(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: A001  # a method of that name
    if not isinstance(private_of(self, "compiled_call"), Capped):  # a copy
        return type(self).compile(self, *args, **kwargs)
    raise LowtideError(
        "this model is capped, and compiling it in place would take the place of the cap. Cap it with "
        'executor="inductor" for fused kernels, or lowtide.uncap(model) first'
    )


_METHODS = (__call__, compile)
