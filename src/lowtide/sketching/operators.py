"""Sketches as operators of their own on a GPU: one kernel each instead of some twenty, and one op in a plan.

Everywhere else, and on a GPU without Triton, the plain operators run, which a compiler fuses.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch

__all__ = ["have_kernels", "operator"]

_HAS_TRITON = find_spec("triton") is not None


def have_kernels(x: torch.Tensor) -> bool:
    """Whether the sketches of a tensor run as kernels of their own."""
    return _HAS_TRITON and x.is_cuda


def operator(name: str, schema: str, plain: Callable[..., Any], empty: Callable[..., Any]) -> Any:
    """An operator that runs the kernel of that name on a GPU, and what it stands for on other devices.

    `empty` makes its results without their numbers: for a capture, and for the kernel to write to.
    """

    def run_kernel(*args: Any) -> Any:
        from . import kernels  # which needs Triton

        made = empty(*args)
        getattr(kernels, name)(*args, made)
        return made

    full = f"lowtide::{name}"
    torch.library.define(full, schema)
    torch.library.impl(full, "cpu", plain)
    torch.library.impl(full, "cuda", run_kernel)
    torch.library.register_fake(full, empty)
    return getattr(torch.ops.lowtide, name).default
