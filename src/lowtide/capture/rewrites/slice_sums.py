"""Sums of the slices of two tensors, as slices of one sum.

What several concatenations read, as each layer of a DenseNet reads all features so far, has a gradient from
each. That of a concatenation is cut into a slice for every part, and each slice is added to the sum of those
before: for n layers that is n²/2 sums of their own, and as many kernels. Neighbouring slices that are added
have been cut from the same two tensors: those are added, and the sum is cut. Every number is the sum of the
same two numbers as before.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import fx

from ..fx_insert import call_before

__all__ = ["join_sums"]

aten = torch.ops.aten


class _Slice(NamedTuple):
    """What a node cuts out of its source."""

    source: fx.Node
    dim: int
    start: int
    end: int


def join_sums(graph: fx.Graph) -> None:
    """Add two tensors where neighbouring slices of them are added, and the sums added to again."""
    for node in list(graph.nodes):
        for sums in _sums_with(node):
            for run in _runs(sums):
                _join(run)


def _sums_with(source: fx.Node) -> list[dict[int, fx.Node]]:
    """Where slices of this tensor are added to slices of another: the sums by their place, for each other."""
    found: dict[tuple[fx.Node, int, int], dict[int, fx.Node]] = {}
    for total in {user: None for cut in source.users if _slice(cut) for user in cut.users}:
        pair = _summands(total)
        if pair is not None and pair[1].source is source and _goes_on(total):
            one, other = pair
            # Same offset between the two: only then are neighbouring slices of one also neighbours in the
            # other.
            found.setdefault((one.source, one.dim, other.start - one.start), {})[one.start] = total
    return list(found.values())


def _summands(node: fx.Node) -> tuple[_Slice, _Slice] | None:
    """The two slices, of tensors that are alike but for their lengths, that a node adds."""
    if node.target is not aten.add.Tensor or len(node.args) != 2 or node.kwargs:
        return None
    one, other = map(_slice, node.args)
    if one is None or other is None or one.dim != other.dim or one.end - one.start != other.end - other.start:
        return None
    left, right = (part.source.meta["val"] for part in (one, other))
    alike = left.dtype == right.dtype and _beside(left, one.dim) == _beside(right, one.dim)
    return (one, other) if alike else None


def _slice(node: object) -> _Slice | None:
    if not isinstance(node, fx.Node) or node.target is not aten.slice.Tensor or len(node.args) != 4:
        return None
    source, dim, start, end = node.args
    assert isinstance(source, fx.Node)
    whole = source.meta["val"].shape[dim]
    plain = isinstance(start, int) and isinstance(end, int) and 0 <= start <= min(end, whole)
    return _Slice(source, dim, start, min(end, whole)) if plain else None  # type: ignore[arg-type]


def _beside(tensor: torch.Tensor, dim: int) -> list[int]:
    """The sizes in all dimensions but one."""
    return [size for index, size in enumerate(tensor.shape) if index != dim % tensor.dim()]


def _goes_on(total: fx.Node) -> bool:
    """Whether a sum is only added to a slice again: whatever else reads it should find it by itself."""
    return len(total.users) == 1 and all(_adds_slice(user, total) for user in total.users)


def _adds_slice(node: fx.Node, total: fx.Node) -> bool:
    return node.target is aten.add.Tensor and node.args[0] is total and _slice(node.args[-1]) is not None


def _runs(sums: dict[int, fx.Node]) -> list[list[fx.Node]]:
    """The sums of neighbouring slices, in order."""
    runs: list[list[fx.Node]] = []
    end = None
    for start in sorted(sums):
        if start != end:
            runs.append([])
        runs[-1].append(sums[start])
        end = _bounds(sums[start]).end
    return runs


def _bounds(total: fx.Node) -> _Slice:
    """The first of the slices that a sum adds."""
    found = _slice(total.args[0])
    assert found is not None
    return found


def _join(run: list[fx.Node]) -> None:
    """One sum in the place of several."""
    if len(run) == 1:
        return
    place, first, last = min(run), _summands(run[0]), _summands(run[-1])
    assert first is not None
    assert last is not None
    parts = [
        _cut(place, one.source, one.dim, one.start, end.end) for one, end in zip(first, last, strict=True)
    ]
    whole = call_before(place, aten.add.Tensor, *parts)
    for total in run:
        _, dim, start, end = _bounds(total)
        low = first[0].start
        total.replace_all_uses_with(_cut(place, whole, dim, start - low, end - low))
    for total in run:
        total.graph.erase_node(total)


def _cut(place: fx.Node, source: fx.Node, dim: int, start: int, end: int) -> fx.Node:
    if (start, end) == (0, source.meta["val"].shape[dim]):
        return source
    return call_before(place, aten.slice.Tensor, source, dim, start, end)
