"""Where the rows of a region are in a tensor: dimensions next to each other whose sizes multiply to N.

The logits of two sequences of eight tokens may be [2, 8, V] or [16, V], transposed [V, 16]: all have their
16 rows in one span of dimensions, in the same order. A chunk of r rows has 1 in the place of each dimension
of the span but the last, and r there: so it has as many dimensions as the whole, the same call runs on it,
and it broadcasts as the whole does.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

__all__ = ["Span", "aligned", "chunk_size", "merged_size", "permuted", "reshaped", "rows_in"]

Span = tuple[int, int]
"""The first dimension, and the one after the last; the first is larger than 1."""


def rows_in(size: Sequence[int], span: Span) -> int:
    """How many rows there are."""
    return prod(size[span[0] : span[1]])


def tight(size: Sequence[int], span: Span) -> Span:
    """The span without dimensions of size 1 at its ends."""
    low, high = span
    while low < high and size[low] == 1:
        low += 1
    while high > low and size[high - 1] == 1:
        high -= 1
    return low, high


def chunk_size(size: Sequence[int], span: Span, rows: int) -> list[int]:
    """The size of a chunk of rows."""
    low, high = span
    return [*size[:low], *([1] * (high - low - 1)), rows, *size[high:]]


def merged_size(size: Sequence[int], span: Span) -> list[int]:
    """The size with one dimension for all rows."""
    return [*size[: span[0]], rows_in(size, span), *size[span[1] :]]


def reshaped(size: Sequence[int], span: Span, to: Sequence[int]) -> Span | None:
    """Where the rows are after a view; None where it takes rows apart or mixes them with other dimensions."""
    before, rows = prod(size[: span[0]]), rows_in(size, span)
    low = next((at for at in range(len(to) + 1) if prod(to[:at]) == before), None)
    if low is None:
        return None
    while low < len(to) and to[low] == 1:
        low += 1
    high = next((at for at in range(low, len(to) + 1) if prod(to[low:at]) == rows), None)
    return None if high is None else (low, high)


def permuted(span: Span, order: Sequence[int]) -> Span | None:
    """Where the rows are after a permutation; None where that takes them apart."""
    places = [order.index(dim) for dim in range(*span)]
    if places != list(range(places[0], places[0] + len(places))):
        return None
    return places[0], places[-1] + 1


def aligned(tensor: torch.Tensor, like: torch.Tensor, span: Span) -> Span | bool | None:
    """Where the rows are in a tensor that is broadcast to another; False for none, None where it has a part.

    With two sequences, what is there for each position of both is such a part.
    """
    behind = like.ndim - tensor.ndim
    low, high = max(span[0] - behind, 0), span[1] - behind
    if high <= 0 or all(size == 1 for size in tensor.shape[low:high]):
        return False
    sizes, whole = list(tensor.shape[low:high]), list(like.shape[span[0] : span[1]])
    return tight(tensor.shape, (low, high)) if sizes == whole else None
