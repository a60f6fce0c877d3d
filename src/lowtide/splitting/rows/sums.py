"""Rows where numbers are summed: matrix products, reductions, normalisations and losses.

What is summed over rows is a `Total`: each chunk gives its part of the sum.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from ...capture.fx_nodes import is_item, tensors_of
from ...capture.op_classes import type_of
from ..spans import Span
from .part import (
    Call,
    Known,
    Part,
    Total,
    argument,
    dims_of,
    inputs_of,
    same_call,
    tensor_of,
    with_rows,
)

__all__ = ["nll", "nll_backward", "norm", "norm_backward", "product", "reduction", "sum_dtype", "unreduced"]

aten = torch.ops.aten


def product(node: fx.Node, known: Known, want: Span | None) -> Part | None:
    """A product of matrices: rows of one side are rows of the result, rows of both are summed."""
    left, right = node.args[-2:] if type_of(node) == "aten.addmm" else node.args
    assert isinstance(left, fx.Node)
    assert isinstance(right, fx.Node)
    bias = node.args[0] if type_of(node) == "aten.addmm" else None
    if known.get(left) == (1, 2) or known.get(right) == (0, 1):
        product = Total(product=True)
        return None if bias is not None else Part({left: (1, 2), right: (0, 1)}, (product,), same_call(node))
    by_left = known.get(left) == (0, 1) or want == (0, 1)
    span = (0, 1) if by_left else (1, 2)
    if not by_left and known.get(right) != span and want != span and bias not in known:
        return None
    rows = with_rows(node, [bias] if isinstance(bias, fx.Node) else [], tensor_of(node), span)
    if rows is None or (bias in known and bias not in rows):
        return None
    return Part({**rows, (left if by_left else right): span}, (span,), same_call(node))


def reduction(node: fx.Node, known: Known, want: Span | None) -> Part | None:
    """Over other dimensions it is done for each row; a sum or mean over rows is one over chunks."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    tensor, outs = tensor_of(source), tensors_of(node)
    whole = node.target in (aten.sum.default, aten.mean.default)
    dims = list(range(tensor.ndim)) if whole else dims_of(argument(node, 1, "dim", None), tensor.ndim)
    keeps = outs[0].ndim == tensor.ndim
    span = known.get(source)
    if span is None and want is not None:
        span = want if keeps else unreduced(want, dims)
    if span is None:
        return None
    hit = [dim for dim in dims if span[0] <= dim < span[1]]
    if hit:
        return _sum_over_rows(node, source, span, dims) if len(hit) == span[1] - span[0] else None
    before = 0 if keeps else sum(dim < span[0] for dim in dims)
    after = (span[0] - before, span[1] - before)
    return Part({source: span}, (after,) * len(outs), same_call(node))


def unreduced(span: Span, dims: Sequence[int]) -> Span | None:
    """Where rows were before some dimensions went, if those are all before or all after them."""
    before = sum(dim <= span[0] for dim in dims)
    moved = (span[0] + before, span[1] + before)
    return None if any(moved[0] <= dim < moved[1] for dim in dims) else moved


_SUMS = ("aten.sum", "aten.mean")


def _sum_over_rows(node: fx.Node, source: fx.Node, span: Span, dims: list[int]) -> Part | None:
    if type_of(node) not in _SUMS:
        return None
    tensor, out = tensor_of(source), tensor_of(node)
    count = 1
    for dim in dims:
        count *= tensor.shape[dim]
    dtype = sum_dtype(out.dtype)
    keeps = out.ndim == tensor.ndim and tensor.ndim > 0

    def call(rows: int) -> Call:
        return aten.sum.dim_IntList, (source, dims, keeps), {"dtype": dtype}

    over = count if type_of(node) == "aten.mean" else 1
    return Part({source: span}, (Total(over),), call)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums over chunks are held in: at least single precision."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def norm(node: fx.Node, known: Known, want: Span | None) -> Part | None:
    """Normalisation over the last dimensions, with the statistics of each row."""
    source, out = node.args[0], tensors_of(node)
    assert isinstance(source, fx.Node)
    span = known.get(source) or want
    others = [parent for parent in inputs_of(node) if parent is not source]
    if span is None or span[1] > out[0].ndim - len(node.args[1]) or any(p in known for p in others):  # type: ignore[arg-type]
        return None
    return Part({source: span}, (span,) * len(out), same_call(node))


def norm_backward(node: fx.Node, known: Known, want: Span | None) -> Part | None:
    """For each row the gradient of the input, and summed over rows those of weight and bias."""
    gradient, source, normalized = node.args[:3]
    assert isinstance(gradient, fx.Node)
    assert isinstance(source, fx.Node)
    statistics = node.args[3:-3] if type_of(node) == "aten.native_layer_norm_backward" else node.args[3:-2]
    span = known.get(gradient) or known.get(source) or want
    if span is None or span[1] > tensor_of(source).ndim - len(normalized):  # type: ignore[arg-type]
        return None
    rows = dict.fromkeys(
        [gradient, source, *(each for each in statistics if isinstance(each, fx.Node))], span
    )
    items = node.meta["val"]
    present = [isinstance(item, torch.Tensor) for item in items]
    outputs = tuple((span if at == 0 else Total()) if there else None for at, there in enumerate(present))
    return Part(rows, outputs, same_call(node)) if isinstance(items[0], torch.Tensor) else None


_NONE, _MEAN, _SUM = range(3)


def nll(node: fx.Node, known: Known, want: Span | None) -> Part | None:
    """A chunk's sum of losses and of weights; their mean is divided by the weights of all chunks."""
    scores, target, weight, reduction, ignored = node.args
    assert isinstance(scores, fx.Node)
    assert isinstance(target, fx.Node)
    if tensor_of(scores).ndim != 2 or weight in known:
        return None
    rows: dict[fx.Node, Span] = {scores: (0, 1), target: (0, 1)}
    if reduction == _NONE:
        return Part(rows, ((0, 1), Total()), same_call(node))

    if not any(is_item(user) and user.args[1] == 1 for user in node.users):
        return None  # the weights to divide by

    def call(count: int) -> Call:
        return node.target, (scores, target, weight, _SUM, ignored), {}

    return Part(rows, (Total(by=1 if reduction == _MEAN else None), Total()), call)


def nll_backward(node: fx.Node, known: Known, want: Span | None) -> Part | None:
    """For each row the gradient of its scores; what the loss was divided by is known by then."""
    gradient, scores, target, weight, reduction, _, total = node.args
    assert isinstance(gradient, fx.Node)
    assert isinstance(scores, fx.Node)
    assert isinstance(target, fx.Node)
    if tensor_of(scores).ndim != 2 or weight in known or total in known:
        return None
    rows: dict[fx.Node, Span] = {scores: (0, 1), target: (0, 1)}
    if reduction == _NONE:
        rows[gradient] = (0, 1)
    return Part(rows, ((0, 1),), same_call(node))
