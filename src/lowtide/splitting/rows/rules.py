"""What an operator does with the rows of a region: the one place that says so.

A rule is asked with what is known of the rows of a node's inputs, or with the rows that its result should
have, and gives a `Part`: which inputs are read row by row (the others are read whole by every chunk), what
comes out for each row or summed over rows, and the call for a chunk. An operator without a rule, or one that
mixes rows, has no part, and the region ends there. Operators that draw random numbers have none: chunks
would draw others.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from ...capture.fx_nodes import has_effect, is_item, tensors_of
from ...capture.kernel_outputs import items_of
from ...capture.op_classes import type_of
from ..spans import Span, rows_in
from .layouts import pad, permute, reshape, select, squeeze
from .part import (
    Known,
    Part,
    Rule,
    argument,
    dims_of,
    inputs_of,
    same_call,
    span_of_result,
    tensor_of,
    with_rows,
    with_size,
)
from .sums import nll, nll_backward, norm, norm_backward, product, reduction

__all__ = ["part_of"]


def part_of(node: fx.Node, known: Known, want: Span | None = None) -> Part | None:
    """How a node runs on chunks, given where rows are in some of its inputs or should be in its result."""
    if node.op != "call_function" or torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
        return None
    if is_item(node) or has_effect(node):
        return None  # an item is what its source is
    rule = _RULES.get(type_of(node))
    if rule is None and torch.Tag.pointwise in getattr(node.target, "tags", ()):
        rule = _pointwise
    if rule is None:
        return None
    made = rule(node, known, want)
    if made is None or any(made.rows.get(parent) != span for parent, span in known.items()):
        return None  # rows of an input are read, and not row by row
    counts = {rows_in(tensor_of(parent).shape, span) for parent, span in made.rows.items()}
    counts |= {
        rows_in(item.shape, outcome)
        for item, outcome in zip(items_of(node.meta["val"]), made.outputs, strict=True)
        if isinstance(outcome, tuple)
    }
    return made if len(counts) == 1 else None


def _pointwise(node: fx.Node, known: Known, want: Span | None) -> Part | None:
    out, span = tensors_of(node), span_of_result(node, known, want)
    if span is None or len(out) != 1:
        return None
    rows = with_rows(node, inputs_of(node), out[0], span)
    return None if rows is None else Part(rows, (span,), same_call(node))


def _sized(place: int) -> Callable[[fx.Node, Known, Span | None], Part | None]:
    """`expand` and what makes a tensor from nothing: pointwise, with a size among the arguments."""

    def rule(node: fx.Node, known: Known, want: Span | None) -> Part | None:
        made = _pointwise(node, known, want)
        if made is None or not isinstance(made.outputs[0], tuple):
            return None
        return Part(made.rows, made.outputs, with_size(node, place, made.outputs[0]))

    return rule


def _new(node: fx.Node, known: Known, want: Span | None) -> Part | None:
    """A tensor of a size, of the kind of another whose numbers are not read."""
    if want is None or known:
        return None
    return Part({}, (want,), with_size(node, 1, want))


def _along(*places: tuple[int, str]) -> Callable[[fx.Node, Known, Span | None], Part | None]:
    """Operators along a dimension that is not one of rows; else pointwise."""

    def rule(node: fx.Node, known: Known, want: Span | None) -> Part | None:
        out, span = tensors_of(node), span_of_result(node, known, want)
        if span is None:
            return None
        for place, name in places:
            dims = dims_of(argument(node, place, name, 0), out[0].ndim)
            if any(span[0] <= dim < span[1] for dim in dims):
                return None
        rows: dict[fx.Node, Span] = {}
        for parent in inputs_of(node):  # not broadcast: the other dimensions may differ
            size = tensor_of(parent).shape
            if len(size) != out[0].ndim:
                if size.numel() != 1:
                    return None
            elif size[span[0] : span[1]] == out[0].shape[span[0] : span[1]]:
                rows[parent] = span
            else:
                return None
        return Part(rows, (span,) * len(out), same_call(node))

    return rule


def _padded_back(node: fx.Node, known: Known, want: Span | None) -> Part | None:
    """The gradient of a slice: zeros around it, along a dimension that is not one of rows."""
    made = _along((2, "dim"))(node, known, want)
    if made is None or not isinstance(made.outputs[0], tuple):
        return None
    return Part(made.rows, made.outputs, with_size(node, 1, made.outputs[0]))


_RULES: dict[str, Rule] = {
    **dict.fromkeys(["aten.mm", "aten.addmm"], product),
    **dict.fromkeys(["aten.view", "aten._unsafe_view", "aten.reshape", "aten.unsqueeze"], reshape),
    "aten.squeeze": squeeze,
    **dict.fromkeys(["aten.t", "aten.transpose", "aten.permute"], permute),
    "aten.expand": _sized(1),
    **dict.fromkeys(["aten.full", "aten.zeros", "aten.ones", "aten.empty"], _sized(0)),
    **dict.fromkeys(["aten.new_zeros", "aten.new_ones", "aten.new_full", "aten.new_empty"], _new),
    **dict.fromkeys(
        """aten._to_copy aten.clone aten.copy aten.detach aten.alias aten.fill aten.zeros_like aten.ones_like
        aten.full_like aten.empty_like aten.lift_fresh_copy aten.hardtanh_backward aten.elu_backward
        aten.leaky_relu_backward aten.softplus_backward prims.convert_element_type""".split(),  # noqa: SIM905
        _pointwise,
    ),
    **dict.fromkeys(
        """aten.sum aten.mean aten.amax aten.amin aten.var aten.var_mean aten.std aten.logsumexp aten.any
        aten.all aten.prod aten.argmax aten.argmin""".split(),  # noqa: SIM905
        reduction,
    ),
    **dict.fromkeys(["aten._softmax", "aten._log_softmax"], _along((1, "dim"))),
    **dict.fromkeys(["aten._softmax_backward_data", "aten._log_softmax_backward_data"], _along((2, "dim"))),
    **dict.fromkeys(["aten.cumsum", "aten.flip", "aten.sort", "aten.cat"], _along((1, "dim"))),
    **dict.fromkeys(["aten.gather", "aten.scatter", "aten.scatter_add", "aten.slice"], _along((1, "dim"))),
    **dict.fromkeys(["aten.slice_scatter", "aten.split", "aten.split_with_sizes"], _along((2, "dim"))),
    "aten.slice_backward": _padded_back,
    "aten.constant_pad_nd": pad,
    "aten.select": select,
    **dict.fromkeys(["aten.native_layer_norm", "aten._fused_rms_norm"], norm),
    **dict.fromkeys(["aten.native_layer_norm_backward", "aten._fused_rms_norm_backward"], norm_backward),
    "aten.nll_loss_forward": nll,
    "aten.nll_loss_backward": nll_backward,
}
