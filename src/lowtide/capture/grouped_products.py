"""Grouped matrix products of any dtype in a capture, as plain PyTorch computes them.

A mixture of experts multiplies the rows of each expert by its own matrix: `torch.nn.functional.grouped_mm`,
with the ends of the groups in a tensor, so that no size depends on the routing. Its kernels take single
precision, too; while torch traces, its fake tensors refuse all but bfloat16. Libraries know that, and take
another road in a trace (`transformers` a loop over experts, whose backward cannot be traced). In captured
steps the product has a result of the shape and strides that torch's own rule tells, whatever its dtype.

torch remembers what fake operators gave, so a later trace of others in the same process may know it, too.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .._torch import private
from ..process_wide import here

__all__ = ["any_grouped_product"]


class _Here(threading.local):
    on = False


_here = _Here()


@contextmanager
def any_grouped_product() -> Iterator[None]:
    """Let this thread trace grouped products of any dtype for a while."""
    private("fake_kernels").setdefault(torch.ops.aten._grouped_mm.default, _grouped_product)
    with here(_here, on=True):
        yield


def _grouped_product(
    mode: Any, operator: Any, left: Any, right: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None
) -> Any:
    """The result of a product without its numbers; elsewhere, and for bfloat16, torch's own rule is asked."""
    if not _here.on or left.dtype == torch.bfloat16 or left.dtype != right.dtype:
        return NotImplemented
    with mode:
        return private("grouped_product_result")(left, right, offs, out_dtype)
