"""Tensors that are written a part at a time: sums over chunks of rows, and rows that come in chunks.

Adding n partial sums by n ops that each return a new tensor would hold three of them at once. Here a tensor
is started, and written into: nothing else is allocated. Each of these functions has an effect, so it runs
once and in its place; a write returns an empty tensor, which stands for "written so far" in the plan's graph:
whatever reads the tensor afterwards depends on it (`lift` sees to that).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

__all__ = [
    "WRITES",
    "add_part",
    "add_product",
    "adds_products",
    "is_by_parts",
    "put_rows",
    "start_rows",
    "start_total",
]

aten = torch.ops.aten


def start_total(after: torch.Tensor, size: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Zeros to add to; `after` is what must be there before they are worth their memory."""
    return torch.zeros(size, dtype=dtype, device=after.device)


def start_rows(after: torch.Tensor, size: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Memory to put rows into."""
    return torch.empty(size, dtype=dtype, device=after.device)


def add_part(whole: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Add a part to a sum, in the sum's precision."""
    whole.add_(part)
    return whole.new_empty(0)


def add_product(whole: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Add a matrix product to a sum, in the sum's precision, without a tensor for the product.

    CUDA has a kernel for factors in half precision and a sum in single (seen in 2.11-2.13). Where it does not
    run the product is a tensor of its own after all; the price of the op, which is measured there, shows it.
    """
    if left.dtype == whole.dtype:
        whole.addmm_(left, right)
        return whole.new_empty(0)
    try:
        aten.addmm.dtype_out(whole, left, right, whole.dtype, out=whole)
    except (AttributeError, NotImplementedError, RuntimeError):
        whole.add_(torch.mm(left, right))
    return whole.new_empty(0)


def adds_products(factor: torch.Tensor, total: torch.dtype) -> bool:
    """Whether `add_product` needs no tensor for the product."""
    return factor.dtype == total or (factor.is_cuda and hasattr(aten.addmm, "dtype_out"))


def put_rows(whole: torch.Tensor, part: torch.Tensor, dim: int, start: int) -> torch.Tensor:
    """Put rows into their place along a dimension."""
    whole.narrow(dim, start, part.shape[dim]).copy_(part)
    return whole.new_empty(0)


_STARTS = (start_total, start_rows)
WRITES = (add_part, add_product, put_rows)
"""What writes into its first argument."""


def is_by_parts(node: Any) -> bool:
    """Whether an fx node starts or goes on writing such a tensor."""
    return isinstance(node, fx.Node) and (node.target in _STARTS or node.target in WRITES)
