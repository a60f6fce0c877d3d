"""What an operator does with the rows of a region: the one place that says so.

A rule is asked with what is known of the rows of a node's inputs, or with the rows that its result should
have, and gives a `Part`: which inputs are read row by row (the others are read whole by every chunk), what
comes out for each row or summed over rows, and the call for a chunk. An operator without a rule, or one that
mixes rows, has no part, and the region ends there. Operators that draw random numbers have none: chunks
would draw others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ..capture.fx_nodes import has_effect, is_item, tensors_of
from ..capture.kernel_outputs import items_of
from ..capture.op_classes import type_of
from .spans import Span, aligned, chunk_size, permuted, reshaped, rows_in

__all__ = ["Call", "Part", "Total", "part_of"]

aten = torch.ops.aten

Call = tuple[Any, tuple[Any, ...], dict[str, Any]]
Known = Mapping[fx.Node, Span]


@dataclass(frozen=True)
class Total:
    """What is summed over rows, in at least single precision; `over` divides the sum in the end.

    `product` says that a matrix product sums, `by` that the sum is divided by another output's.
    """

    over: int = 1
    by: int | None = None
    product: bool = False


Outcome = Span | Total | None
"""What an output is: rows, a sum over them, or not there."""


@dataclass(frozen=True)
class Part:
    """A node on a chunk: the inputs that have rows, what each output is, and the call for r rows."""

    rows: Known
    outputs: tuple[Outcome, ...]
    call: Callable[[int], Call] = field(repr=False)


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
    counts = {rows_in(_tensor(parent).shape, span) for parent, span in made.rows.items()}
    counts |= {
        rows_in(item.shape, outcome)
        for item, outcome in zip(items_of(node.meta["val"]), made.outputs, strict=True)
        if isinstance(outcome, tuple)
    }
    return made if len(counts) == 1 else None


def _tensor(node: Any) -> torch.Tensor:
    return node.meta["val"]  # type: ignore[no-any-return]


def _inputs(node: fx.Node) -> list[fx.Node]:
    return [parent for parent in node.all_input_nodes if isinstance(parent.meta.get("val"), torch.Tensor)]


def _same_call(node: fx.Node) -> Callable[[int], Call]:
    return lambda rows: (node.target, node.args, dict(node.kwargs))


def _with_size(node: fx.Node, place: int, span: Span) -> Callable[[int], Call]:
    """The call with the size of a chunk in the place of the whole's."""
    size = list(tensors_of(node)[0].shape)

    def call(rows: int) -> Call:
        args = list(node.args)
        args[place] = chunk_size(size, span, rows)
        return node.target, tuple(args), dict(node.kwargs)

    return call


def _span_of_result(node: fx.Node, known: Known, want: Span | None) -> Span | None:
    """Where rows are in what inputs are broadcast to."""
    if want is not None:
        return want
    out = tensors_of(node)[0]
    for parent in _inputs(node):
        if parent in known:
            behind = out.ndim - _tensor(parent).ndim
            return known[parent][0] + behind, known[parent][1] + behind
    return None


def _broadcast(node: fx.Node, inputs: Sequence[fx.Node], like: torch.Tensor, span: Span) -> Known | None:
    """The inputs that have rows where they are broadcast to a tensor; None where one has a part of them."""
    found = {parent: aligned(_tensor(parent), like, span) for parent in inputs}
    if any(place is None for place in found.values()):
        return None
    return {parent: place for parent, place in found.items() if isinstance(place, tuple)}


def _pointwise(node: fx.Node, known: Known, want: Span | None) -> Part | None:
    out, span = tensors_of(node), _span_of_result(node, known, want)
    if span is None or len(out) != 1:
        return None
    rows = _broadcast(node, _inputs(node), out[0], span)
    return None if rows is None else Part(rows, (span,), _same_call(node))


def _sized(place: int) -> Callable[[fx.Node, Known, Span | None], Part | None]:
    """`expand` and what makes a tensor from nothing: pointwise, with a size among the arguments."""

    def rule(node: fx.Node, known: Known, want: Span | None) -> Part | None:
        made = _pointwise(node, known, want)
        if made is None or not isinstance(made.outputs[0], tuple):
            return None
        return Part(made.rows, made.outputs, _with_size(node, place, made.outputs[0]))

    return rule


def _new(node: fx.Node, known: Known, want: Span | None) -> Part | None:
    """A tensor of a size, of the kind of another whose numbers are not read."""
    if want is None or known:
        return None
    return Part({}, (want,), _with_size(node, 1, want))


def _mm(node: fx.Node, known: Known, want: Span | None) -> Part | None:
    left, right = node.args[-2:] if type_of(node) == "aten.addmm" else node.args
    assert isinstance(left, fx.Node)
    assert isinstance(right, fx.Node)
    bias = node.args[0] if type_of(node) == "aten.addmm" else None
    if known.get(left) == (1, 2) or known.get(right) == (0, 1):
        product = Total(product=True)
        return None if bias is not None else Part({left: (1, 2), right: (0, 1)}, (product,), _same_call(node))
    by_left = known.get(left) == (0, 1) or want == (0, 1)
    span = (0, 1) if by_left else (1, 2)
    if not by_left and known.get(right) != span and want != span and bias not in known:
        return None
    rows = _broadcast(node, [bias] if isinstance(bias, fx.Node) else [], _tensor(node), span)
    if rows is None or (bias in known and bias not in rows):
        return None
    return Part({**rows, (left if by_left else right): span}, (span,), _same_call(node))


def _reshape(node: fx.Node, known: Known, want: Span | None) -> Part | None:
    source, out = node.args[0], _tensor(node)
    assert isinstance(source, fx.Node)
    size = _tensor(source).shape
    span = known.get(source) or (want and reshaped(out.shape, want, size))
    after = span and reshaped(size, span, out.shape)
    if not span or not after:
        return None
    keeps = type_of(node) in ("aten.unsqueeze", "aten.squeeze")
    return Part({source: span}, (after,), _same_call(node) if keeps else _with_size(node, 1, after))


def _squeeze(node: fx.Node, known: Known, want: Span | None) -> Part | None:
    made = _reshape(node, known, want) if len(node.args) == 2 else None
    if made is None:
        return None
    ((source, span),) = made.rows.items()
    dims = _dims(node.args[1], _tensor(source).ndim)
    # a chunk may have one row, which must stay a dimension
    return None if any(span[0] <= dim < span[1] for dim in dims) else made


def _permute(node: fx.Node, known: Known, want: Span | None) -> Part | None:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    ndim = _tensor(source).ndim
    order = _order(node, ndim)
    span = known.get(source) or (want and permuted(want, [order.index(dim) for dim in range(ndim)]))
    after = span and permuted(span, order)
    return Part({source: span}, (after,), _same_call(node)) if span and after else None


def _order(node: fx.Node, ndim: int) -> list[int]:
    """Which dimension of the source each one of the result is."""
    order = list(range(ndim))
    if type_of(node) == "aten.permute":
        return [int(dim) % ndim for dim in node.args[1]]  # type: ignore[union-attr,arg-type]
    one, other = (0, 1) if type_of(node) == "aten.t" else (int(dim) % ndim for dim in node.args[1:3])  # type: ignore[arg-type]
    if ndim > 1:
        order[one], order[other] = order[other], order[one]
    return order


def _dims(dims: Any, ndim: int) -> list[int]:
    """Dimensions counted from the front; none named are all."""
    if dims is None or dims == []:
        return list(range(ndim))
    return [int(dim) % max(ndim, 1) for dim in (dims if isinstance(dims, list | tuple) else [dims])]


def _argument(node: fx.Node, place: int, name: str, default: Any) -> Any:
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def _reduction(node: fx.Node, known: Known, want: Span | None) -> Part | None:
    """Over other dimensions it is done for each row; a sum or mean over rows is one over chunks."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    tensor, outs = _tensor(source), tensors_of(node)
    whole = node.target in (aten.sum.default, aten.mean.default)
    dims = list(range(tensor.ndim)) if whole else _dims(_argument(node, 1, "dim", None), tensor.ndim)
    keeps = outs[0].ndim == tensor.ndim
    span = known.get(source)
    if span is None and want is not None:
        span = want if keeps else _unreduced(want, dims)
    if span is None:
        return None
    hit = [dim for dim in dims if span[0] <= dim < span[1]]
    if hit:
        return _sum_over_rows(node, source, span, dims) if len(hit) == span[1] - span[0] else None
    before = 0 if keeps else sum(dim < span[0] for dim in dims)
    after = (span[0] - before, span[1] - before)
    return Part({source: span}, (after,) * len(outs), _same_call(node))


def _unreduced(span: Span, dims: Sequence[int]) -> Span | None:
    """Where rows were before some dimensions went, if those are all before or all after them."""
    before = sum(dim <= span[0] for dim in dims)
    moved = (span[0] + before, span[1] + before)
    return None if any(moved[0] <= dim < moved[1] for dim in dims) else moved


_SUMS = ("aten.sum", "aten.mean")


def _sum_over_rows(node: fx.Node, source: fx.Node, span: Span, dims: list[int]) -> Part | None:
    if type_of(node) not in _SUMS:
        return None
    tensor, out = _tensor(source), _tensor(node)
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


def _along(*places: tuple[int, str]) -> Callable[[fx.Node, Known, Span | None], Part | None]:
    """Operators along a dimension that is not one of rows; else pointwise."""

    def rule(node: fx.Node, known: Known, want: Span | None) -> Part | None:
        out, span = tensors_of(node), _span_of_result(node, known, want)
        if span is None:
            return None
        for place, name in places:
            dims = _dims(_argument(node, place, name, 0), out[0].ndim)
            if any(span[0] <= dim < span[1] for dim in dims):
                return None
        rows: dict[fx.Node, Span] = {}
        for parent in _inputs(node):  # not broadcast: the other dimensions may differ
            size = _tensor(parent).shape
            if len(size) != out[0].ndim:
                if size.numel() != 1:
                    return None
            elif size[span[0] : span[1]] == out[0].shape[span[0] : span[1]]:
                rows[parent] = span
            else:
                return None
        return Part(rows, (span,) * len(out), _same_call(node))

    return rule


def _select(node: fx.Node, known: Known, want: Span | None) -> Part | None:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    (dim,) = _dims(node.args[1], _tensor(source).ndim)
    span = known.get(source) or (want and _unreduced(want, [dim]))
    if not span or span[0] <= dim < span[1]:
        return None
    after = (span[0] - (dim < span[0]), span[1] - (dim < span[0]))
    return Part({source: span}, (after,), _same_call(node))


def _padded_back(node: fx.Node, known: Known, want: Span | None) -> Part | None:
    """The gradient of a slice: zeros around it, along a dimension that is not one of rows."""
    made = _along((2, "dim"))(node, known, want)
    if made is None or not isinstance(made.outputs[0], tuple):
        return None
    return Part(made.rows, made.outputs, _with_size(node, 1, made.outputs[0]))


def _pad(node: fx.Node, known: Known, want: Span | None) -> Part | None:
    source, out = node.args[0], _tensor(node)
    assert isinstance(source, fx.Node)
    span = known.get(source) or want
    padded = len(node.args[1]) // 2  # type: ignore[arg-type]
    if span is None or span[1] > out.ndim - padded:
        return None
    return Part({source: span}, (span,), _same_call(node))


def _norm(node: fx.Node, known: Known, want: Span | None) -> Part | None:
    """Normalisation over the last dimensions, with the statistics of each row."""
    source, out = node.args[0], tensors_of(node)
    assert isinstance(source, fx.Node)
    span = known.get(source) or want
    others = [parent for parent in _inputs(node) if parent is not source]
    if span is None or span[1] > out[0].ndim - len(node.args[1]) or any(p in known for p in others):  # type: ignore[arg-type]
        return None
    return Part({source: span}, (span,) * len(out), _same_call(node))


def _norm_backward(node: fx.Node, known: Known, want: Span | None) -> Part | None:
    """For each row the gradient of the input, and summed over rows those of weight and bias."""
    gradient, source, normalized = node.args[:3]
    assert isinstance(gradient, fx.Node)
    assert isinstance(source, fx.Node)
    statistics = node.args[3:-3] if type_of(node) == "aten.native_layer_norm_backward" else node.args[3:-2]
    span = known.get(gradient) or known.get(source) or want
    if span is None or span[1] > _tensor(source).ndim - len(normalized):  # type: ignore[arg-type]
        return None
    rows = dict.fromkeys(
        [gradient, source, *(each for each in statistics if isinstance(each, fx.Node))], span
    )
    items = node.meta["val"]
    present = [isinstance(item, torch.Tensor) for item in items]
    outputs = tuple((span if at == 0 else Total()) if there else None for at, there in enumerate(present))
    return Part(rows, outputs, _same_call(node)) if isinstance(items[0], torch.Tensor) else None


_NONE, _MEAN, _SUM = range(3)


def _nll(node: fx.Node, known: Known, want: Span | None) -> Part | None:
    """A chunk's sum of losses and of weights; their mean is divided by the weights of all chunks."""
    scores, target, weight, reduction, ignored = node.args
    assert isinstance(scores, fx.Node)
    assert isinstance(target, fx.Node)
    if _tensor(scores).ndim != 2 or weight in known:
        return None
    rows: dict[fx.Node, Span] = {scores: (0, 1), target: (0, 1)}
    if reduction == _NONE:
        return Part(rows, ((0, 1), Total()), _same_call(node))

    if not any(is_item(user) and user.args[1] == 1 for user in node.users):
        return None  # the weights to divide by

    def call(count: int) -> Call:
        return node.target, (scores, target, weight, _SUM, ignored), {}

    return Part(rows, (Total(by=1 if reduction == _MEAN else None), Total()), call)


def _nll_backward(node: fx.Node, known: Known, want: Span | None) -> Part | None:
    gradient, scores, target, weight, reduction, _, total = node.args
    assert isinstance(gradient, fx.Node)
    assert isinstance(scores, fx.Node)
    assert isinstance(target, fx.Node)
    if _tensor(scores).ndim != 2 or weight in known or total in known:
        return None
    rows: dict[fx.Node, Span] = {scores: (0, 1), target: (0, 1)}
    if reduction == _NONE:
        rows[gradient] = (0, 1)
    return Part(rows, ((0, 1),), _same_call(node))


Rule = Callable[[fx.Node, Known, Span | None], Part | None]
_RULES: dict[str, Rule] = {
    **dict.fromkeys(["aten.mm", "aten.addmm"], _mm),
    **dict.fromkeys(["aten.view", "aten._unsafe_view", "aten.reshape", "aten.unsqueeze"], _reshape),
    "aten.squeeze": _squeeze,
    **dict.fromkeys(["aten.t", "aten.transpose", "aten.permute"], _permute),
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
        _reduction,
    ),
    **dict.fromkeys(["aten._softmax", "aten._log_softmax"], _along((1, "dim"))),
    **dict.fromkeys(["aten._softmax_backward_data", "aten._log_softmax_backward_data"], _along((2, "dim"))),
    **dict.fromkeys(["aten.cumsum", "aten.flip", "aten.sort", "aten.cat"], _along((1, "dim"))),
    **dict.fromkeys(["aten.gather", "aten.scatter", "aten.scatter_add", "aten.slice"], _along((1, "dim"))),
    **dict.fromkeys(["aten.slice_scatter", "aten.split", "aten.split_with_sizes"], _along((2, "dim"))),
    "aten.slice_backward": _padded_back,
    "aten.constant_pad_nd": _pad,
    "aten.select": _select,
    **dict.fromkeys(["aten.native_layer_norm", "aten._fused_rms_norm"], _norm),
    **dict.fromkeys(["aten.native_layer_norm_backward", "aten._fused_rms_norm_backward"], _norm_backward),
    "aten.nll_loss_forward": _nll,
    "aten.nll_loss_backward": _nll_backward,
}
