"""Products without the zeros that torch pads their sums with, where rows are aligned without them.

Libraries multiply fast where rows begin at aligned addresses. A logit for each of 30522 words does not give
such rows, so torch pads the operands of the product with zeros (`pad_mm`), which writes a whole copy of them.
But what a loop of Inductor writes has rows that Inductor itself spreads to aligned addresses: there the copy
gains nothing, and at the end of a language model it is the largest tensor of the step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ._torch import private
from .fusion import fusing
from .rewrite import look_anew

__all__ = ["unpad_products"]

aten = torch.ops.aten

_ALIGNMENT = 16
_VIEWS = (
    aten.t.default,
    aten.permute.default,
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
)


def unpad_products(graph: fx.Graph) -> None:
    """Let products read what was padded in the dimension that they sum over, where its rows are aligned."""
    for node in graph.find_nodes(op="call_function", target=aten.mm.default):
        operands = [_unpadded(node.args[place], dim=1 - place) for place in (0, 1)]
        if all(operand is not None and (_is_aligned(operand) or _writer(operand)) for operand in operands):
            node.args = tuple(operands)
            for writer in filter(None, map(_writer, operands)):
                _spread(writer)


def _unpadded(node: Any, dim: int) -> fx.Node | None:
    """What a node pads with zeros behind the end of one dimension alone."""
    if node.target is not aten.constant_pad_nd.default or any(node.args[2:]) or node.kwargs:
        return None
    source, amounts = node.args[:2]  # before and behind: the last dimension, the first one
    before, behind = ([*amounts, 0, 0][start:4:2] for start in (0, 1))
    return None if any(before) or behind[dim] else source


def _is_aligned(node: fx.Node) -> bool:
    """Whether the rows of a matrix in memory (its columns, if those lie there as rows) are aligned."""
    value = node.meta["val"]
    row = max(value.stride())
    return isinstance(row, int) and row * value.element_size() % _ALIGNMENT == 0


def _writer(node: fx.Node | None) -> fx.Node | None:
    """The loop that writes the rows of a matrix, if Inductor spreads them."""
    while node is not None and node.target in _VIEWS and _keeps_rows(node):
        node = node.args[0]  # type: ignore[assignment]
    if node is None or node.op != "call_function" or node.target in _VIEWS or fusing(node) != "loop":
        return None
    value, config = node.meta["val"], private("inductor_config")
    long = isinstance(value.shape[-1], int) and value.shape[-1] > config.padding_stride_threshold
    return node if long and value.is_contiguous() and config.comprehensive_padding else None


def _keeps_rows(view: fx.Node) -> bool:
    before, after = view.args[0].meta["val"], view.meta["val"]  # type: ignore[union-attr]
    return view.target in (aten.t.default, aten.permute.default) or before.shape[-1] == after.shape[-1]


def _spread(node: fx.Node) -> None:
    """Let a loop's result have the rows that Inductor gives it."""
    old = node.meta["val"]
    step = private("inductor_config").padding_alignment_bytes // old.element_size()
    row = -(-old.shape[-1] // step) * step
    with old.fake_mode:
        wide = torch.empty((*old.shape[:-1], row), dtype=old.dtype, device=old.device)
        node.meta["val"] = wide[..., : old.shape[-1]]
    for user in node.users:
        look_anew(user, old)
