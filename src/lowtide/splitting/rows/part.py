"""A node on a chunk of rows, and what the rules share to say so."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ...capture.fx_nodes import tensors_of
from ..spans import Span, aligned, chunk_size

__all__ = [
    "Call",
    "Known",
    "Outcome",
    "Part",
    "Rule",
    "Total",
    "argument",
    "dims_of",
    "inputs_of",
    "same_call",
    "span_of_result",
    "tensor_of",
    "with_rows",
    "with_size",
]

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


Rule = Callable[[fx.Node, Known, Span | None], Part | None]
"""How a node runs on chunks, if it does, by the known rows of its inputs or the wanted ones of its result."""


def tensor_of(node: Any) -> torch.Tensor:
    """The fake tensor that a node gives."""
    return node.meta["val"]  # type: ignore[no-any-return]


def inputs_of(node: fx.Node) -> list[fx.Node]:
    """The inputs that are tensors."""
    return [parent for parent in node.all_input_nodes if isinstance(parent.meta.get("val"), torch.Tensor)]


def same_call(node: fx.Node) -> Callable[[int], Call]:
    """The call of the whole, for any number of rows."""
    return lambda rows: (node.target, node.args, dict(node.kwargs))


def with_size(node: fx.Node, place: int, span: Span) -> Callable[[int], Call]:
    """The call with the size of a chunk in the place of the whole's."""
    size = list(tensors_of(node)[0].shape)

    def call(rows: int) -> Call:
        args = list(node.args)
        args[place] = chunk_size(size, span, rows)
        return node.target, tuple(args), dict(node.kwargs)

    return call


def span_of_result(node: fx.Node, known: Known, want: Span | None) -> Span | None:
    """Where rows are in what inputs are broadcast to."""
    if want is not None:
        return want
    out = tensors_of(node)[0]
    for parent in inputs_of(node):
        if parent in known:
            behind = out.ndim - tensor_of(parent).ndim
            return known[parent][0] + behind, known[parent][1] + behind
    return None


def with_rows(node: fx.Node, inputs: Sequence[fx.Node], like: torch.Tensor, span: Span) -> Known | None:
    """The inputs that have rows where they are broadcast to a tensor; None where one has a part of them."""
    found = {parent: aligned(tensor_of(parent), like, span) for parent in inputs}
    if any(place is None for place in found.values()):
        return None
    return {parent: place for parent, place in found.items() if isinstance(place, tuple)}


def dims_of(dims: Any, ndim: int) -> list[int]:
    """Dimensions counted from the front; none named are all."""
    if dims is None or dims == []:
        return list(range(ndim))
    return [int(dim) % max(ndim, 1) for dim in (dims if isinstance(dims, list | tuple) else [dims])]


def argument(node: fx.Node, place: int, name: str, default: Any) -> Any:
    """An argument by its place or its name."""
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)
