"""Which rows of a value in the backward can be other than zero, as far as the joint graph shows it.

Problem: where a model goes on with one token of each sequence ([CLS]), the gradient of all that it computed
for the others since attention last mixed them is zero. A layer there needs only some rows of its input for
its exact weight gradient.

Method: the backward is gone through once. A gradient of `x[:, 0]` or of another part by plain indices is zero
outside of that part; operators that work on each row by itself pass zero rows on. What no rule covers may be
other than zero everywhere. A row is all of a tensor but its last dimension.

Limits: parts by indices that are tensors are not seen, since their values are not known here.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import fx

__all__ = ["Mask", "Part", "gradient_rows", "part_of"]

aten, prims = torch.ops.aten, torch.ops.prims

Mask = npt.NDArray[np.bool_]
"""Which rows may be other than zero; in numpy, since torch is tracing meanwhile."""

Find = Callable[[Any], Mask | None]
"""The mask of a node; None where all of its rows may be other than zero."""


class Part(NamedTuple):
    """Rows from `start` to `stop` of every `period` rows."""

    period: int
    start: int
    stop: int

    def rows(self, rows: int) -> int:
        """How many of n rows these are."""
        return rows // self.period * (self.stop - self.start)

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """These rows of a matrix."""
        return x.reshape(-1, self.period, x.shape[1])[:, self.start : self.stop].reshape(-1, x.shape[1])


def part_of(rows: Mask) -> Part | None:
    """The part that is just these rows, where there is one."""
    found = np.flatnonzero(rows).tolist()
    if not found or len(found) == len(rows):
        return None
    start = found[0]
    run = next((n for n, row in enumerate(found) if row != start + n), len(found))
    period = found[run] - start if run < len(found) else len(rows)
    if len(rows) % period or start + run > period:
        return None
    part = Part(period, start, start + run)
    inside = np.arange(len(rows)) % period
    return part if np.array_equal(rows, (part.start <= inside) & (inside < part.stop)) else None


def gradient_rows(graph: fx.Graph) -> dict[fx.Node, Mask]:
    """The rows of each node that may be other than zero, where not all may."""
    found: dict[fx.Node, Mask] = {}
    for node in graph.nodes:
        rule = _RULES.get(node.target) if node.op == "call_function" else None
        rows = rule(node, found.get) if rule is not None else None
        if rows is not None:
            found[node] = rows
    return found


def _shape(node: Any) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def _as_first(node: fx.Node, find: Find) -> Mask | None:
    """Each row depends on the same row of the first argument, and is zero where that is."""
    rows = find(node.args[0])
    value = node.meta["val"]
    shape = value[0].shape if isinstance(value, list | tuple) else value.shape
    return rows if rows is not None and rows.shape == shape[:-1] else None


def _product(node: fx.Node, find: Find) -> Mask | None:
    known = [rows for rows in map(find, node.all_input_nodes) if rows is not None]
    shape = _shape(node)[:-1]
    masks = [np.broadcast_to(rows, shape) for rows in known]
    return np.logical_and.reduce(masks) if masks else None


def _sum(node: fx.Node, find: Find) -> Mask | None:
    left, right = map(find, node.args[:2])
    if left is None or right is None:
        return None
    shape = _shape(node)[:-1]
    return np.broadcast_to(left, shape) | np.broadcast_to(right, shape)  # type: ignore[no-any-return]


def _quotient(node: fx.Node, find: Find) -> Mask | None:
    return None if isinstance(node.args[1], fx.Node) else _as_first(node, find)


def _view(node: fx.Node, find: Find) -> Mask | None:
    rows, shape = find(node.args[0]), _shape(node)
    same = rows is not None and shape and shape[-1:] == _shape(node.args[0])[-1:]
    return rows.reshape(shape[:-1]) if rows is not None and same else None


def _transposed(node: fx.Node, find: Find) -> Mask | None:
    """A permutation that leaves the last dimension in its place."""
    rows = find(node.args[0])
    if rows is None:
        return None
    args: Any = node.args
    dims = list(range(rows.ndim + 1))
    if node.target is aten.permute.default:
        dims = [dims[dim] for dim in args[1]]
    else:
        dims[args[1]], dims[args[2]] = dims[args[2]], dims[args[1]]
    *order, last = dims
    return rows.transpose(order) if last == rows.ndim else None


def _zeros(node: fx.Node, find: Find) -> Mask | None:
    return np.zeros(_shape(node)[:-1], dtype=bool) if node.args[1] == 0 else None


def _padded(node: fx.Node, find: Find) -> Mask | None:
    """The gradient of a part by plain indices: zero outside of it."""
    args: Any = node.args
    part, sizes, dim, *where = args
    place = where[0] if node.target is aten.select_backward.default else slice(*where)
    return _put(np.zeros(tuple(sizes)[:-1], dtype=bool), part, dim, place, find)


def _scattered(node: fx.Node, find: Find) -> Mask | None:
    """A part that is written into a whole."""
    given: tuple[Any, ...] = node.args
    rows = find(given[0])
    if rows is None or node.kwargs:
        return None
    missing: tuple[Any, ...] = (0, None, None, None)[len(given) - 2 :]
    _, part, dim, start, stop, step = (*given, *missing)
    place = start if node.target is aten.select_scatter.default else slice(start, stop, step)
    return _put(rows.copy(), part, dim, place, find)


def _put(rows: Mask, part: Any, dim: int, place: int | slice, find: Find) -> Mask | None:
    dim = dim % (rows.ndim + 1)
    if dim == rows.ndim:  # a part of every row
        return None
    inside = find(part)
    rows[(slice(None),) * dim + (place,)] = True if inside is None else inside
    return rows


def _layer_norm(node: fx.Node, find: Find) -> Mask | None:
    """The gradient of what was normalised; the other two outputs are sums over rows."""
    args: Any = node.args
    source, index = args
    if index != 0 or source.target is not aten.native_layer_norm_backward.default:
        return None
    gradient, _, sizes, *_ = source.args
    return find(gradient) if len(sizes) == 1 else None


def _sum_in_rows(node: fx.Node, find: Find) -> Mask | None:
    args: Any = node.args
    whole, dims, *keep = args
    rank = len(_shape(whole))
    return find(whole) if keep == [True] and [dim % rank for dim in dims] == [rank - 1] else None


_RULES: dict[Any, Callable[[fx.Node, Find], Mask | None]] = {
    **dict.fromkeys(
        (
            aten.neg.default,
            aten.clone.default,
            aten.detach.default,
            aten._to_copy.default,
            prims.convert_element_type.default,
            aten.mm.default,
            aten.mul.Scalar,
            aten.div.Scalar,
            aten.gelu_backward.default,
            aten.threshold_backward.default,
            aten.tanh_backward.default,
            aten.sigmoid_backward.default,
            aten.silu_backward.default,
            aten.native_dropout_backward.default,
        ),
        _as_first,
    ),
    aten.mul.Tensor: _product,
    aten.div.Tensor: _quotient,
    aten.add.Tensor: _sum,
    aten.sub.Tensor: _sum,
    **dict.fromkeys((aten.view.default, aten._unsafe_view.default, aten.reshape.default), _view),
    **dict.fromkeys((aten.permute.default, aten.transpose.int), _transposed),
    aten.full.default: _zeros,
    **dict.fromkeys((aten.select_backward.default, aten.slice_backward.default), _padded),
    **dict.fromkeys((aten.select_scatter.default, aten.slice_scatter.default), _scattered),
    operator.getitem: _layer_norm,
    aten.sum.dim_IntList: _sum_in_rows,
}
