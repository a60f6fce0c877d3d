"""Kernels of the CPU that are known to return other strides or sizes than tracing foretells, by rule.

Measuring an op needs no rule; these are for plans that are made where nothing runs. They were found by
running every operator of torch's own test inputs on real and on fake tensors of five layouts (574 operators,
2.13): of the 36 that differ, these are the ones that training steps have. The others are layouts of broadcast
comparisons and of padded images; the executor meets them in the first run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ..._torch import private
from ..fx_nodes import read_by, tensors_of
from ..kernel_outputs import Output, Outputs, outputs_of
from .batchnorm import batch_norm

__all__ = ["by_rule"]

aten = torch.ops.aten


def by_rule(node: fx.Node) -> Outputs | None:
    """What a kernel returns, where a rule knows it."""
    rule = _RULES.get(node.target)
    tensors = tensors_of(node)
    if rule is None or not tensors or any(tensor.device.type != "cpu" for tensor in tensors):
        return None
    return rule(node, outputs_of(node.meta["val"], read_by(node)))


def _in_suggested_format(node: fx.Node, fake: Outputs) -> Outputs:
    """BatchNorm makes its output contiguous, or an image with its channels last where its input is one."""
    x: Any = node.args[0]
    wanted = private("suggest_memory_format")(x.meta["val"])
    return (_contiguous(tensors_of(node)[0], wanted), *fake[1:])


def _wanted_in_suggested_format(node: fx.Node, fake: Outputs) -> Outputs:
    """BatchNorm's backward returns nothing where its mask says so, and a gradient laid out as its input."""
    x: Any = node.args[1]
    mask: Any = node.args[9]
    wanted = private("suggest_memory_format")(x.meta["val"])
    first = _contiguous(x.meta["val"], wanted)
    return tuple(each if asked else None for each, asked in zip((first, *fake[1:]), mask, strict=True))


def _plain(node: fx.Node, fake: Outputs) -> Outputs:
    """Every output is contiguous."""
    return tuple(_contiguous(tensor, torch.contiguous_format) for tensor in tensors_of(node))


def _as_large_as_inputs(node: fx.Node, fake: Outputs) -> Outputs | None:
    """A loss that is reduced into the first number of a buffer for all of them, and keeps the buffer."""
    (value,), inputs = tensors_of(node), [arg for arg in node.args[:2] if isinstance(arg, fx.Node)]
    if value.dim() or fake[0] is None:  # not reduced
        return None
    shape = torch.broadcast_shapes(*(arg.meta["val"].shape for arg in inputs))
    return (replace(fake[0], bytes=shape.numel() * value.element_size()),)


def _contiguous(tensor: torch.Tensor, wanted: torch.memory_format) -> Output:
    with private("without_modes")():
        laid = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta", memory_format=wanted)
    return Output(laid.numel() * laid.element_size(), tuple(laid.stride()))


_RULES: dict[Any, Callable[[fx.Node, Outputs], Outputs | None]] = {
    batch_norm: _in_suggested_format,
    aten._native_batch_norm_legit.default: _in_suggested_format,
    aten._native_batch_norm_legit.no_stats: _in_suggested_format,
    aten._native_batch_norm_legit_functional.default: _in_suggested_format,
    aten._native_batch_norm_legit_no_training.default: _in_suggested_format,
    aten.native_batch_norm.default: _in_suggested_format,
    aten.native_batch_norm_backward.default: _wanted_in_suggested_format,
    aten.mse_loss_backward.default: _plain,
    aten.smooth_l1_loss_backward.default: _plain,
    aten.huber_loss_backward.default: _plain,
    aten.log_sigmoid_forward.default: _plain,
    aten.mse_loss.default: _as_large_as_inputs,
    aten.smooth_l1_loss.default: _as_large_as_inputs,
    aten.soft_margin_loss.default: _as_large_as_inputs,
    aten.binary_cross_entropy.default: _as_large_as_inputs,
}
