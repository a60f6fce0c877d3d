"""Reads inputs and output gradients of layers while a step runs, and keeps the variances that follow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .._torch import private_of, storage_key
from ..errors import LowtideError
from .choice import Choice
from .function import cast
from .layers import is_sketched, shown
from .moments import moments
from .scope import Scope

__all__ = ["Call", "Recorder"]


@dataclass(frozen=True)
class Call:
    """One call of a layer: its input's shape and place, and its variances. `rows` are the real ones."""

    name: str
    choice: Choice
    source: Any
    all_rows: int
    rows: int
    features: int
    dtype: torch.dtype
    own: float
    here: float
    law: Callable[[int], float]
    hidden: float

    @property
    def bytes(self) -> int:
        """The bytes of the input."""
        return self.all_rows * self.features * self.dtype.itemsize

    def kept(self, choice: Choice) -> int:
        """The bytes that are kept of it."""
        return choice.bytes(self.all_rows, self.features, self.dtype)

    def variance(self, choice: Choice) -> float:
        """The variance of the weight gradient by a sketch; `here` by the one that was chosen."""
        if choice.is_exact(self.all_rows, self.features, self.dtype) or not self.rows:
            return 0.0
        return self.here if choice == self.choice else self.law(choice.rows(self.all_rows))


class Recorder:
    """Hooks on the layers of a model, and the calls that they saw, in the order of the backward."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.names: list[str] = []
        self.handles: list[Any] = []

    def add_sketched(self, model: nn.Module) -> None:
        """Watch the layers that are sketched, each as it is."""
        for name, layer in model.named_modules():
            if is_sketched(layer):
                _, choice, scope = layer.forward.args  # type: ignore[union-attr]
                self.add(name, layer, choice, scope)

    def add(self, name: str, layer: nn.Module, choice: Choice, scope: Scope) -> None:
        """Watch a layer."""

        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            source = args[0] if args else kwargs["input"]
            return self.look(name, choice, scope, source, output) if output.requires_grad else None

        self.names.append(name)
        self.handles.append(layer.register_forward_hook(hook, with_kwargs=True))

    def look(
        self, name: str, choice: Choice, scope: Scope, source: torch.Tensor, output: torch.Tensor
    ) -> Any:
        """Keep an input until the gradient of the output comes; gives the output to go on with."""
        x, version = cast(source.detach()), private_of(source, "version")
        place = (storage_key(source), source.storage_offset(), source.stride(), version)
        real = scope.real_rows(x)

        def take(gradient: torch.Tensor) -> None:
            if private_of(source, "version") != version:
                raise LowtideError(f"the input of {shown(name)!r} was changed in place before its backward")
            self.calls.append(_call(name, choice, place, x, gradient, real))

        return _Seen.apply(output, take)  # type: ignore[no-untyped-call]

    def by_layer(self) -> list[tuple[str, list[Call]]]:
        """The calls of each layer that got a gradient, in the order of the model."""
        found = [(name, [call for call in self.calls if call.name == name]) for name in self.names]
        return [(name, calls) for name, calls in found if calls]

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self.handles:
            handle.remove()


class _Seen(torch.autograd.Function):
    """Hands the output on and shows its gradient, also where the next layer changes it in place."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, take: Callable[[torch.Tensor], None]) -> Any:
        ctx.take = take
        return torch.ops.aten._unsafe_view.default(output, output.shape)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        ctx.take(gradient)
        return gradient, None


@torch.no_grad()
def _call(
    name: str, choice: Choice, source: Any, x: torch.Tensor, g: torch.Tensor, real: torch.Tensor | None
) -> Call:
    x, g = (t.detach().reshape(-1, t.shape[-1]) for t in (x, g))
    rows, features = x.shape
    hidden = 0.0
    seen = x, g
    if real is not None:
        hidden = float(g[~real].double().square().sum() / g.double().square().sum().clamp(min=1e-300))
        kept = x[real], g[real]
        seen = kept if choice.made.leaves_out else (_zeroed(x, real), _zeroed(g, real))
        x, g = kept
    return Call(
        name=name,
        choice=choice,
        source=source,
        all_rows=rows,
        rows=x.shape[0],
        features=features,
        dtype=x.dtype,
        own=moments(x, g).own,
        here=choice.made.variance(*seen, choice.rows(rows)),
        law=choice.made.variance_law(*seen),
        hidden=hidden,
    )


def _zeroed(t: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """The rows, with zeros for those that are not real."""
    return t.masked_fill(~real[:, None], 0)
