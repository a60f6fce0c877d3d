"""Results of a step that are computed when somebody looks at them: the logits of a head that ran in chunks.

A language model returns its logits beside the loss, and a training loop lets them go unread. Where they are a
product of something small that is there, the step returns in their place a tensor without memory that holds
that, and what to do with it: the first operator that reads it gets the numbers. It must do so before the
weights change, and says so where they have.

The step itself returns a *hollow* tensor: it has the size of the result and the storage of what is held, so a
plan counts that as long as the result is held. `Deferral.fill` puts the tensor that users see in its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .._torch import private, private_of
from ..errors import LowtideError

__all__ = ["Deferral", "Deferred"]

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class Deferral:
    """A result of a step that is computed later.

    `compute` takes what is held and the primals `reads`; `layout` is how the former lies in its storage.
    """

    compute: fx.GraphModule
    reads: tuple[int, ...]
    size: tuple[int, ...]
    dtype: torch.dtype
    layout: tuple[tuple[int, ...], tuple[int, ...], int]

    def fill(self, results: Any, weights: Sequence[torch.Tensor]) -> Any:
        """The results of a call, with what users see in the place of the hollow one."""
        if not isinstance(results, list | tuple):
            return results
        return type(results)(
            _Late.apply(item, Recipe(self, item, weights)) if self.is_hollow(item) else item
            for item in results
        )

    def is_hollow(self, item: Any) -> bool:
        """Whether a result is the one that stands for this one."""
        if not isinstance(item, torch.Tensor) or isinstance(item, Deferred):
            return False
        return (tuple(item.shape), item.dtype) == (self.size, self.dtype) and not any(item.stride())


class Recipe:
    """What is held of a deferred result, and the result once somebody has looked."""

    def __init__(self, deferral: Deferral, hollow: torch.Tensor, weights: Sequence[torch.Tensor]) -> None:
        self.deferral = deferral
        self.held: torch.Tensor | None = hollow.detach().as_strided(*deferral.layout)
        self.weights = [weight.detach() for weight in weights]
        self.versions = [private_of(weight, "version") for weight in self.weights]
        self.found: torch.Tensor | None = None

    def result(self) -> torch.Tensor:
        """The numbers, computed at the first look."""
        if self.found is None:
            if [private_of(weight, "version") for weight in self.weights] != self.versions:
                raise LowtideError(
                    f"a result of size {list(self.deferral.size)} (logits, say) was read after the weights "
                    "that it is computed from had changed: with split= it is computed when it is first read. "
                    "Read it before optimizer.step(), or cap without split="
                )
            with torch.no_grad():
                self.found = self.deferral.compute(self.held, *self.weights)
            self.held = None
        return self.found


class Deferred(torch.Tensor):
    """A tensor without memory, whose numbers come when an operator reads them."""

    recipe: Recipe

    @staticmethod
    def make(recipe: Recipe) -> Deferred:
        """The tensor of a recipe."""
        assert recipe.held is not None or recipe.found is not None
        device = (recipe.found if recipe.held is None else recipe.held).device  # type: ignore[union-attr]
        made = private("wrapper_tensor")(
            Deferred, recipe.deferral.size, dtype=recipe.deferral.dtype, device=device
        )
        made.recipe = recipe
        return made  # type: ignore[no-any-return]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Deferred({list(self.shape)}, {self.dtype}, computed when it is read)"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _LOOKS_AT_MEMORY:
            args = (args[0].recipe.result(), *args[1:])
            return func(*args, **(kwargs or {}))
        with private("without_torch_function")():  # what comes out is a plain tensor
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in (aten.detach.default, aten.alias.default):
            return cls.make(args[0].recipe)
        args, kwargs = private("tree_map_only")(cls, lambda it: it.recipe.result(), (args, kwargs or {}))
        return func(*args, **kwargs)


_LOOKS_AT_MEMORY = (
    *(torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__, torch.Tensor.data_ptr),
    *(torch.Tensor.untyped_storage, torch.Tensor.__reduce_ex__, torch.Tensor.__deepcopy__),
)
"""What reads a tensor's memory without an operator."""


class _Late(torch.autograd.Function):
    """A deferred result in the place of the hollow one; a gradient for it goes to the step, which refuses."""

    @staticmethod
    def forward(ctx: Any, hollow: torch.Tensor, recipe: Recipe) -> torch.Tensor:
        return Deferred.make(recipe)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None
