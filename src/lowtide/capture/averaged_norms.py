"""BatchNorm with `momentum=None`, whose statistics are the averages of all batches.

How much the newest batch weighs, one over the number of batches, is read from a buffer and comes to the
kernel as a Python number: another one at each call, at which a trace stops. Here the kernel is one operator
that is given the buffer, and reads it when it runs. A trace that is rewritten (`rewrites/batchnorm.py`) has
eager's own kernels in its place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._torch import private, private_of
from ..process_wide import attributes

__all__ = ["AVERAGED", "averages_traced", "newest"]

aten = torch.ops.aten

_forward = private("AnyBatchNorm").forward


def averages_traced() -> attributes:
    """Let layers that average their statistics be traced; other threads run them as they are meanwhile."""
    return attributes(private("AnyBatchNorm"), forward=_as_traced)


def _as_traced(self: Any, x: Tensor) -> Tensor:
    private_of(self, "check_input_dim")(x)
    alone = x.numel() == x.shape[1]  # one number for each channel is an error
    if not torch.compiler.is_dynamo_compiling() or not _averages(self) or alone:
        return _forward(self, x)  # type: ignore[no-any-return]
    self.num_batches_tracked.add_(1)
    mean, var = self.running_mean, self.running_var
    out, _, _, new_mean, new_var = torch.ops.lowtide.averaged_batch_norm(
        x, self.weight, self.bias, mean, var, self.num_batches_tracked, self.eps
    )
    mean.copy_(new_mean)
    var.copy_(new_var)
    return out  # type: ignore[no-any-return]


def _averages(norm: Any) -> bool:
    """Whether a layer reads the number of its batches in a call."""
    counts = norm.training and norm.track_running_stats and norm.num_batches_tracked is not None
    return bool(counts and norm.momentum is None)


def newest(batches: Tensor) -> float:
    """What the newest of some batches weighs; numbers that are made up to time a kernel may be zero."""
    return 1.0 / (float(batches) or 1.0)


def _run(x: Tensor, weight: Any, bias: Any, mean: Tensor, var: Tensor, count: Tensor, eps: float) -> Any:
    return _functional(x, weight, bias, mean, var, True, newest(count), eps)


def _empty(x: Tensor, weight: Any, bias: Any, mean: Tensor, var: Tensor, count: Tensor, eps: float) -> Any:
    return _functional(x, weight, bias, mean, var, True, 0.0, eps)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, *_, ctx.eps = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(x, weight, *output[1:3])


def _differentiate(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
    x, weight, *saved = ctx.saved_tensors
    wanted = list(ctx.needs_input_grad[:3])
    made = aten.native_batch_norm_backward(grad, x, weight, None, None, *saved, True, ctx.eps, wanted)
    return *made, None, None, None, None


_functional = aten._native_batch_norm_legit_functional.default

torch.library.define(
    "lowtide::averaged_batch_norm",
    "(Tensor x, Tensor? weight, Tensor? bias, Tensor mean, Tensor var, Tensor count, float eps)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
torch.library.impl("lowtide::averaged_batch_norm", ("cpu", "cuda"), _run)
torch.library.register_fake("lowtide::averaged_batch_norm", _empty)
torch.library.register_autograd("lowtide::averaged_batch_norm", _differentiate, setup_context=_save)

AVERAGED = torch.ops.lowtide.averaged_batch_norm.default
