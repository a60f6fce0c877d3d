"""Rows where a tensor gets another layout: reshaped, permuted, selected from, padded."""

from __future__ import annotations

from torch import fx

from ...capture.op_classes import type_of
from ..spans import Span, permuted, reshaped
from .part import Known, Part, dims_of, same_call, tensor_of, with_size
from .sums import unreduced

__all__ = ["pad", "permute", "reshape", "select", "squeeze"]


def reshape(node: fx.Node, known: Known, want: Span | None) -> Part | None:
    """Rows stay where the other dimensions can be folded without them."""
    source, out = node.args[0], tensor_of(node)
    assert isinstance(source, fx.Node)
    size = tensor_of(source).shape
    span = known.get(source) or (want and reshaped(out.shape, want, size))
    after = span and reshaped(size, span, out.shape)
    if not span or not after:
        return None
    keeps = type_of(node) in ("aten.unsqueeze", "aten.squeeze")
    return Part({source: span}, (after,), same_call(node) if keeps else with_size(node, 1, after))


def squeeze(node: fx.Node, known: Known, want: Span | None) -> Part | None:
    """As a reshape, where no dimension of rows may go."""
    made = reshape(node, known, want) if len(node.args) == 2 else None
    if made is None:
        return None
    ((source, span),) = made.rows.items()
    dims = dims_of(node.args[1], tensor_of(source).ndim)
    # a chunk may have one row, which must stay a dimension
    return None if any(span[0] <= dim < span[1] for dim in dims) else made


def permute(node: fx.Node, known: Known, want: Span | None) -> Part | None:
    """Rows go where their dimensions do."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    ndim = tensor_of(source).ndim
    order = _order(node, ndim)
    span = known.get(source) or (want and permuted(want, [order.index(dim) for dim in range(ndim)]))
    after = span and permuted(span, order)
    return Part({source: span}, (after,), same_call(node)) if span and after else None


def _order(node: fx.Node, ndim: int) -> list[int]:
    """Which dimension of the source each one of the result is."""
    order = list(range(ndim))
    if type_of(node) == "aten.permute":
        return [int(dim) % ndim for dim in node.args[1]]  # type: ignore[union-attr,arg-type]
    one, other = (0, 1) if type_of(node) == "aten.t" else (int(dim) % ndim for dim in node.args[1:3])  # type: ignore[arg-type]
    if ndim > 1:
        order[one], order[other] = order[other], order[one]
    return order


def select(node: fx.Node, known: Known, want: Span | None) -> Part | None:
    """One place of a dimension that is not one of rows."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    (dim,) = dims_of(node.args[1], tensor_of(source).ndim)
    span = known.get(source) or (want and unreduced(want, [dim]))
    if not span or span[0] <= dim < span[1]:
        return None
    after = (span[0] - (dim < span[0]), span[1] - (dim < span[0]))
    return Part({source: span}, (after,), same_call(node))


def pad(node: fx.Node, known: Known, want: Span | None) -> Part | None:
    """Padding of the last dimensions, which are not rows."""
    source, out = node.args[0], tensor_of(node)
    assert isinstance(source, fx.Node)
    span = known.get(source) or want
    padded = len(node.args[1]) // 2  # type: ignore[arg-type]
    if span is None or span[1] > out.ndim - padded:
        return None
    return Part({source: span}, (span,), same_call(node))
