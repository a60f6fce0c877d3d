"""The truth about a step: its peak bytes and its seconds, on each device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from .meter import Measurement, Meter

__all__ = ["Measurement", "measure"]


def measure(
    step: Callable[[], Any],
    *,
    device: torch.device | str | None = None,
    resident: Iterable[torch.Tensor] = (),
) -> Measurement:
    """Run a step once and give its peak bytes and its seconds.

    `resident` names tensors to count even if the step does not touch them (optimizer state, say); on CUDA
    everything that is allocated counts anyway. The device is CUDA where tensors are on one, else the CPU.
    On CUDA the allocator's peak statistics are reset.

    >>> import lowtide, torch
    >>> w = torch.ones(1000, requires_grad=True)
    >>> lowtide.measure(lambda: (w * 2).sum().backward(), device="cpu").peak
    8008
    """
    where = _default_device() if device is None else torch.device(device)
    meter = Meter()
    meter.begin(where, resident)
    try:
        step()
    finally:
        taken = meter.end()
    assert taken is not None
    return taken


def _default_device() -> torch.device:
    on_cuda = torch.cuda.is_available() and torch.cuda.is_initialized() and torch.cuda.memory_allocated()
    return torch.device("cuda" if on_cuda else "cpu")
