"""Matrices that torch pads for a product: written with their padding once, and read so by everything.

Libraries multiply fast where the sizes of matrices are aligned, which 30522 words are not. So torch pads the
operands of such a product with zeros (`pad_mm`). Where an operand is written by a loop anyway, that loop can
write the zeros too: there is no copy of it (at the end of a language model it is the largest tensor of the
step), and other products of it run as fast.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..fx_insert import call_after
from ..op_classes import fusing

__all__ = ["pad_once"]

aten = torch.ops.aten

_TRANSPOSES = ((aten.t.default, ()), (aten.permute.default, ([1, 0],)))


def pad_once(graph: fx.Graph) -> None:
    """Let everything that reads what is padded for a product read the padded matrix."""
    for padded in graph.find_nodes(op="call_function", target=aten.constant_pad_nd.default):
        source: Any = padded.args[0]
        others = [user for user in source.users if user is not padded]
        if _pads_rows(padded) and _is_loop(source) and all(user.op != "output" for user in others):
            # Right after the loop that makes it, so that the two fuse and only the padded matrix is in
            # memory.
            source.append(padded)
            part = call_after(padded, aten.slice.Tensor, padded, 1, 0, source.meta["val"].shape[1])
            for user in others:
                user.replace_input_with(source, part)
            for transposed in [user for user in others if (user.target, user.args[1:]) in _TRANSPOSES]:
                _multiply_padded(transposed, padded)


def _pads_rows(padded: fx.Node) -> bool:
    """Whether zeros are put after the rows of a matrix, and the whole goes into products."""
    amounts: Any = padded.args[1]
    after_rows = [bool(amount) for amount in (*amounts, 0, 0)[:4]] == [False, True, False, False]
    in_products = all(user.target is aten.mm.default for user in padded.users)
    zeros = not any(padded.args[2:]) and not padded.kwargs.get("value")
    return after_rows and in_products and zeros and padded.meta["val"].dim() == 2


def _is_loop(node: fx.Node) -> bool:
    return node.op == "call_function" and fusing(node) == "loop"


def _multiply_padded(transposed: fx.Node, padded: fx.Node) -> None:
    """Form products of the transposed matrix with its padding: they get a few rows that nothing reads."""
    products = [user for user in transposed.users if user.target is aten.mm.default]
    products = [product for product in products if product.args[0] is transposed is not product.args[1]]
    whole = call_after(transposed, transposed.target, padded, *transposed.args[1:])
    for product in products:
        longer = call_after(product, aten.mm.default, whole, product.args[1])
        part = call_after(longer, aten.slice.Tensor, longer, 0, 0, product.meta["val"].shape[0])
        product.replace_all_uses_with(part)
