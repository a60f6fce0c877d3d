"""The CTC loss (Graves et al. 2006) in a capture, as large as the longest label of the batch makes it.

Its kernel keeps a table for the backward, rows by time by twice the longest label, so a trace stops there.
The lengths of labels come with the batch, and the longest of them is asked of it, as sizes of masks are
(`known_sizes`): a batch whose longest label is another one is another step, with a plan of its own. The
kernels are eager's, and so are the bits.

On the host alone: on a GPU cuDNN may run the loss, or a kernel whose sums have no fixed order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["ctc_loss"]

aten = torch.ops.aten


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
    *,
    longest: int,
) -> Tensor:
    """`torch.nn.functional.ctc_loss` of labels the longest of which is known."""
    inputs, labels = (torch.as_tensor(lengths) for lengths in (input_lengths, target_lengths))
    batched = log_probs if log_probs.dim() == 3 else log_probs.unsqueeze(1)
    given = (targets.to(torch.long), inputs.reshape(-1), labels.reshape(-1))
    loss: Tensor
    loss, _ = torch.ops.lowtide.ctc_loss(batched, *given, blank, zero_infinity, longest)
    if zero_infinity:
        loss = torch.where(loss == float("inf"), loss.new_zeros(()), loss)
    if reduction == "mean":
        return (loss / labels.to(loss.dtype).clamp_min(1)).mean()
    if reduction == "sum":
        return loss.sum()
    return loss if log_probs.dim() == 3 else loss.squeeze(0)


def _lengths(log_probs: Tensor, inputs: Tensor, labels: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    """The lengths, or, where they were made up to see what the kernel takes, some that fit its results."""
    if int(labels.max()) == longest:
        return inputs, labels
    fitting = torch.zeros_like(labels)
    fitting[:1] = longest
    return torch.full_like(inputs, log_probs.shape[0]), fitting


def _loss(
    log_probs: Tensor, targets: Tensor, inputs: Tensor, labels: Tensor, blank: int, zeros: bool, longest: int
) -> tuple[Tensor, Tensor]:
    inputs, labels = _lengths(log_probs, inputs, labels, longest)
    return aten._ctc_loss.Tensor(log_probs, targets, inputs, labels, blank, zeros)  # type: ignore[no-any-return]


def _empty(log_probs: Tensor, targets: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    time, rows, _ = log_probs.shape
    return log_probs.new_empty(rows), log_probs.new_empty(rows, time, 2 * others[-1] + 1)


def _backward(
    grad: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    inputs: Tensor,
    labels: Tensor,
    loss: Tensor,
    table: Tensor,
    blank: int,
    zeros: bool,
    longest: int,
) -> Tensor:
    inputs, labels = _lengths(log_probs, inputs, labels, longest)
    return aten._ctc_loss_backward.Tensor(  # type: ignore[no-any-return]
        grad, log_probs, targets, inputs, labels, loss, table, blank, zeros
    )


def _empty_gradient(grad: Tensor, log_probs: Tensor, *others: Any) -> Tensor:
    return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:4], *output)
    ctx.options = inputs[4:]


def _differentiate(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
    gradient = torch.ops.lowtide.ctc_loss_backward(grad, *ctx.saved_tensors, *ctx.options)
    return gradient, None, None, None, None, None, None


_LENGTHS = "Tensor inputs, Tensor labels"
_OPTIONS = "int blank, bool zeros, int longest"
for _name, _schema, _run, _fake in (
    (
        "ctc_loss",
        f"(Tensor log_probs, Tensor targets, {_LENGTHS}, {_OPTIONS}) -> (Tensor, Tensor)",
        _loss,
        _empty,
    ),
    (
        "ctc_loss_backward",
        f"(Tensor grad, Tensor log_probs, Tensor targets, {_LENGTHS}, Tensor loss, Tensor table, {_OPTIONS})"
        " -> Tensor",
        _backward,
        _empty_gradient,
    ),
):
    torch.library.define(f"lowtide::{_name}", _schema)
    torch.library.impl(f"lowtide::{_name}", "cpu", _run)
    torch.library.register_fake(f"lowtide::{_name}", _fake)
torch.library.register_autograd("lowtide::ctc_loss", _differentiate, setup_context=_save)
