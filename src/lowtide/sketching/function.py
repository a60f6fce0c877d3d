"""A linear layer that keeps a sketch of its input.

The output is that of `nn.Linear` with its weight held constant: autograd then keeps the weight for the
gradient of the input and nothing of the input itself, and the output and the gradients of input and bias are
the same bits. A second function, which does nothing forward, gives the weight its gradient from the sketch.
Both consist of plain operators that torch.compile traces, so in a captured step sketches are values like all
others.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ..errors import UnsupportedBackward
from . import marker
from .choice import Choice, fixed
from .draw import draw_seed
from .kind import Kept
from .kinds import KINDS
from .scope import Scope

__all__ = ["cast", "forward"]


def forward(module: nn.Linear, choice: Choice, scope: Scope, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  # nn.Linear's
    """What `nn.Linear.forward` gives, with less kept for the backward."""
    weight, bias = module.weight, module.bias
    if not (weight.requires_grad and (module.training or torch.is_grad_enabled())):
        return functional.linear(input, weight, bias)
    if not input.dim():
        return functional.linear(input, weight, bias)  # which says what is wrong
    x = cast(input)
    rows, features = fixed(x.shape[:-1].numel()), x.shape[-1]
    if choice.is_exact(rows, features, x.dtype):
        return functional.linear(x, weight, bias)
    output = _linear(x, weight.detach(), bias)
    if not torch.is_grad_enabled():
        draw_seed(x)  # as a checkpoint does that recomputes this with grad
        return output
    real = scope.real_rows(x)
    with torch.no_grad(), _without_autocast(x.device):
        seed, kept = scope.sketch(input, x, choice, real)
    made = _WeightGradient.apply(  # type: ignore[no-untyped-call]
        output, weight, choice.kind, choice.rows(rows), marker.is_marked(choice), seed, real, *kept
    )
    return made  # type: ignore[no-any-return]


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """What torch computes for a weight that trains: other inputs than plain ones are flattened before."""
    if x.dim() <= 2 or x.is_contiguous():
        return functional.linear(x, weight, bias)
    output = functional.linear(x.reshape(-1, x.shape[-1]), weight).view(*x.shape[:-1], -1)
    return output if bias is None else output + bias.to(output.dtype)


def cast(x: torch.Tensor) -> torch.Tensor:
    """The input as autocast hands it to a linear layer."""
    kind = x.device.type
    if not _casts(kind) or not x.is_floating_point() or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(kind))


class _WeightGradient(torch.autograd.Function):
    """Hands the output on, and gives the weight a gradient from what was kept."""

    @staticmethod
    def forward(  # type: ignore[override]  # without setup_context, for which torch binds a signature each time
        ctx: Any,
        output: torch.Tensor,
        weight: torch.Tensor,
        kind: str,
        k: int,
        marked: bool,
        seed: torch.Tensor,
        real: torch.Tensor | None,
        *kept: torch.Tensor,
    ) -> torch.Tensor:
        ctx.kind, ctx.k, ctx.marked, ctx.dtype = kind, k, marked, weight.dtype
        again = (seed, real) if KINDS[kind].redraws else (None, None)
        ctx.save_for_backward(*again, *kept)
        # not a view to autograd, so that the next layer may change it in place; nothing keeps the first one
        return torch.ops.aten._unsafe_view.default(output, output.shape)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        _refuse_create_graph()
        seed, real, *kept = ctx.saved_tensors
        of_weight = _weight_gradient(ctx, seed, real, tuple(kept), gradient)
        return (gradient, of_weight.to(ctx.dtype), *(None for _ in range(5 + len(kept))))


def _weight_gradient(ctx: Any, seed: Any, real: Any, kept: Kept, gradient: torch.Tensor) -> torch.Tensor:
    rows = gradient.reshape(-1, gradient.shape[-1])
    with _without_autocast(gradient.device):
        if ctx.marked:
            return marker.weight_gradient(rows, list(kept), seed, ctx.kind, ctx.k, real)  # type: ignore[no-any-return]
        return KINDS[ctx.kind].weight_gradient(rows, kept, seed, ctx.k, real)


def _without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Sums of a sketch are in single precision at least, also inside of autocast."""
    return torch.autocast(device.type, enabled=False) if _casts(device.type) else nullcontext()


def _casts(kind: str) -> bool:
    """Whether autocast is on for a kind of device."""
    return _has_autocast(kind) and torch.is_autocast_enabled(kind)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch 2.11 cannot trace it
def _has_autocast(kind: str) -> bool:
    return torch.amp.is_autocast_available(kind)


def _refuse_create_graph() -> None:
    if not torch.compiler.is_compiling() and torch.is_grad_enabled():
        raise UnsupportedBackward(
            "the backward of a sketched layer was called with create_graph=True, for a second derivative, "
            "which needs the layer's input; lowtide.unsketch the model, or sketch only other layers"
        )
