"""Which layers of a model can be sketched, and which of them were asked for."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from .._torch import private_of
from ..errors import LowtideError
from .choice import Choice
from .function import forward

__all__ = [
    "Layers",
    "choice_of",
    "chosen_layers",
    "is_sketched",
    "refuse_compiled",
    "refuse_sketched",
    "shown",
]

Layers = str | Iterable[str] | Callable[[str, nn.Module], bool] | None
"""Names or patterns of layers or of modules around them, or a function that says which; None for all."""


def is_sketched(module: nn.Module) -> bool:
    """Whether a module's forward is that of a sketched layer."""
    found = module.__dict__.get("forward")
    return isinstance(found, functools.partial) and found.func is forward


def choice_of(module: nn.Module) -> Choice:
    """What a sketched layer keeps."""
    return module.__dict__["forward"].args[1]  # type: ignore[no-any-return]


def chosen_layers(model: nn.Module, layers: Layers) -> dict[str, nn.Linear]:
    """The layers that were asked for, by name; refuses names that lead to none."""
    linear = {name: part for name, part in model.named_modules() if isinstance(part, nn.Linear)}
    able = {name: part for name, part in linear.items() if obstacle(model, name, part) is None}
    if layers is None:
        found = able
    elif callable(layers):
        found = {name: part for name, part in able.items() if layers(name, part)}
    elif not isinstance(layers, Iterable):
        raise LowtideError(f"layers= takes names, patterns or a function, not {layers!r}")
    else:
        patterns = [layers] if isinstance(layers, str) else list(layers)
        wanted = {name for pattern in patterns for name in _matches(model, pattern, linear, able)}
        found = {name: part for name, part in able.items() if name in wanted}
    if not found:
        raise LowtideError(_nothing(model, linear, able))
    return found


def obstacle(model: nn.Module, name: str, layer: nn.Linear) -> str | None:
    """Why a layer cannot be sketched."""
    if type(layer).forward is not nn.Linear.forward or ("forward" in vars(layer) and not is_sketched(layer)):
        return "has a forward of its own"
    parent = model.get_submodule(name.rpartition(".")[0]) if "." in name else model
    if isinstance(parent, nn.MultiheadAttention):
        return "is not called by nn.MultiheadAttention, which reads its weight itself"
    if isinstance(layer.weight, nn.parameter.UninitializedParameter):
        return "has no weight yet; run the model once before"
    if not layer.weight.requires_grad:
        return "is frozen, and so keeps nothing of its input"
    return None if layer.weight.is_floating_point() else f"has a weight of {layer.weight.dtype}"


def shown(name: str) -> str:
    """The name of a layer as it is shown: the model itself has none."""
    return name or "(the model)"


def _matches(
    model: nn.Module, pattern: Any, linear: dict[str, nn.Linear], able: dict[str, nn.Linear]
) -> list[str]:
    """The layers that a pattern names, by themselves or by a module around them."""
    if not isinstance(pattern, str):
        raise LowtideError(f"layers= takes names, patterns or a function, not {pattern!r}")
    modules = [name for name, _ in model.named_modules()]
    named = {name for name in modules if fnmatchcase(name, pattern)}
    if not named:
        near = difflib.get_close_matches(pattern, modules, n=3, cutoff=0.4) or list(able)[:3]
        raise LowtideError(f"no module is called {pattern!r}; there are {', '.join(map(shown, near))}")
    inside = [name for name in linear if named & set(_around(name))]
    found = [name for name in inside if name in able]
    if found:
        return found
    if not inside:
        raise LowtideError(f"{pattern!r} has no nn.Linear in it, and only those can be sketched")
    why = obstacle(model, inside[0], linear[inside[0]])
    raise LowtideError(f"{shown(inside[0])!r} cannot be sketched: it {why}")


def _around(name: str) -> list[str]:
    """A module's name and those of the modules around it."""
    parts = name.split(".")
    return ["", *(".".join(parts[: end + 1]) for end in range(len(parts)))] if name else [""]


def _nothing(model: nn.Module, linear: dict[str, nn.Linear], able: dict[str, nn.Linear]) -> str:
    if able:
        return f"layers= left none of the {len(able)} layers that can be sketched"
    if not linear:
        return f"this {type(model).__name__} has no nn.Linear in it, and only those can be sketched"
    name, layer = next(iter(linear.items()))
    return (
        f"none of the {len(linear)} nn.Linear can be sketched: {shown(name)!r} {obstacle(model, name, layer)}"
    )


def refuse_compiled(model: Any) -> None:
    """A compiled or capped step was captured as it was."""
    if not isinstance(model, nn.Module):
        raise LowtideError(f"sketch takes a module, not a {type(model).__name__}")
    if private_of(model, "compiled_module", None) is not None:
        raise LowtideError("this model is wrapped by torch.compile; sketch it first, and compile it then")
    for name, part in model.named_modules():
        if private_of(part, "compiled_call") is not None:
            what = "the model" if not name else repr(name)
            raise LowtideError(
                f"{what} is capped or compiled already; undo that (lowtide.uncap), sketch, and cap it then"
            )


def refuse_sketched(layers: dict[str, nn.Linear]) -> None:
    """A layer has one sketch."""
    for name, layer in layers.items():
        if is_sketched(layer):
            raise LowtideError(
                f"{shown(name)!r} is sketched already; lowtide.unsketch the model to choose anew"
            )
