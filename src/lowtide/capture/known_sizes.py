"""Sizes that depend on a mask of the batch, taken as the batch has them.

How many rows `x[mask]` has is not known before the step runs, and no bytes can be planned for them. Where the
mask comes from the batch alone, as in graph nets or with padded labels, the batch at hand can be asked, as
with branches (`branches`): the call is captured with that size, and that the mask has so many is a condition,
asked again before each call. A batch with another number is another step, with a plan of its own.

The table of the CTC loss is as large as the longest label says, which is asked in the same way (`ctc`).

The elements are found by `nonzero_static`, which has the same order as the mask, and read by their places:
results and gradients are those of the mask, bit for bit.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from .._torch import traced_value
from .conditions import mark
from .ctc import ctc_loss

__all__ = ["Ask", "has_known_sizes", "with_known_size"]

Ask = Callable[[fx.Node], torch.Tensor | None]
"""What the batch says of a tensor of the trace; None where it does not."""


def places(mask: torch.Tensor, size: int) -> torch.Tensor:
    """The places of a known number of elements that are not zero."""
    return torch.nonzero_static(mask, size=size)


def places_by_dimension(mask: torch.Tensor, size: int) -> tuple[torch.Tensor, ...]:
    """The same, as `nonzero(as_tuple=True)` has them."""
    return places(mask, size).unbind(1)


def where_true(x: torch.Tensor, mask: torch.Tensor, size: int, *, after: int = 0) -> torch.Tensor:
    """`x[mask]`, or `x[:, mask]` with as many whole dimensions before."""
    return x[(slice(None),) * after + places_by_dimension(mask, size)]


def selected(x: torch.Tensor, mask: torch.Tensor, size: int) -> torch.Tensor:
    """`torch.masked_select(x, mask)`: each element of a smaller mask stands for several."""
    wide, everywhere = torch.broadcast_tensors(x, mask)
    return where_true(wide, everywhere, size * (everywhere.numel() // max(mask.numel(), 1)))


def has_known_sizes(graph: fx.Graph) -> bool:
    """Whether a graph has calls with a size that a batch was asked for."""
    return any(
        node.target in (places, places_by_dimension, where_true, selected, ctc_loss) for node in graph.nodes
    )


def with_known_size(node: fx.Node, ask: Ask) -> None:
    """Give a call whose result is as large as the batch says the number of the batch, where that is known."""
    if node.target is torch.nn.functional.ctc_loss:
        _with_longest_label(node, ask)
        return
    found = _call(node)
    if found is None:
        return
    function, args, kwargs = found
    size = _number(node, torch.count_nonzero, args[-1], ask)
    if size is not None:
        node.op, node.target, node.args, node.kwargs = "call_function", function, (*args, size), kwargs


def _number(
    node: fx.Node, reduce: Callable[[torch.Tensor], torch.Tensor], of: fx.Node, ask: Ask
) -> int | None:
    """A number of the batch that a call depends on, which is a condition from here on."""
    told = ask(of)
    if told is None:
        return None
    size, graph = int(reduce(told)), node.graph
    with graph.inserting_before(node):
        number = graph.call_function(reduce, (of,))
        condition = graph.call_function(operator.eq, (number, size))
        graph.call_function(mark, (condition, True))
    return size


def _with_longest_label(node: fx.Node, ask: Ask) -> None:
    """Let the CTC loss know the longest label, on the host."""
    lengths: Any = node.args[3] if len(node.args) > 3 else node.kwargs["target_lengths"]
    log_probs: Any = node.args[0] if node.args else node.kwargs["log_probs"]
    if traced_value(log_probs).device.type != "cpu":
        return
    longest = _number(node, torch.max, lengths, ask) if isinstance(lengths, fx.Node) else _longest(lengths)
    if longest is not None:
        node.target, node.kwargs = ctc_loss, {**node.kwargs, "longest": longest}


def _longest(lengths: Any) -> int | None:
    whole = isinstance(lengths, list | tuple) and all(isinstance(length, int) for length in lengths)
    return max(lengths) if whole and lengths else None


_Call = tuple[Callable[..., Any], tuple[fx.Node, ...], dict[str, Any]]


def _call(node: fx.Node) -> _Call | None:
    """The function in whose place one with a known size may stand, with its tensors, the mask last."""
    given = tuple(arg for arg in node.args if isinstance(arg, fx.Node))
    if node.target is operator.getitem and given:
        return _indexing(given[0], node.args[1])
    if node.target in (torch.masked_select, "masked_select") and len(given) == 2:
        return (selected, given, {}) if _is_mask(given[1]) else None
    if len(given) != 1 or len(node.args) != 1 or not isinstance(traced_value(given[0]), torch.Tensor):
        return None
    if node.target is torch.where and not node.kwargs:
        return places_by_dimension, given, {}
    if node.target in (torch.nonzero, "nonzero"):
        return places_by_dimension if node.kwargs.get("as_tuple") else places, given, {}
    return None


def _indexing(x: fx.Node, index: Any) -> _Call | None:
    """An index by one mask, with nothing but whole dimensions before it."""
    *before, mask = index if isinstance(index, tuple) else (index,)
    if any(each != slice(None) for each in before) or not _is_mask(mask):
        return None
    after, mine = len(before), traced_value(mask).shape
    if traced_value(x).shape[after : after + len(mine)] != mine:
        return None  # the step's own error
    return where_true, (x, mask), {"after": after} if after else {}


def _is_mask(node: Any) -> bool:
    value = traced_value(node) if isinstance(node, fx.Node) else None
    return isinstance(value, torch.Tensor) and value.dtype == torch.bool and value.dim() > 0
