"""The truth about a step: its peak bytes and its seconds, on each device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..arguments import all_of, function
from ..errors import LowtideError
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
    function("step", step, "step()")
    resident = all_of("resident", resident, torch.Tensor, "tensors, as in resident=model.parameters()")
    where = _default_device() if device is None else _device(device)
    meter = Meter()
    meter.begin(where, resident)
    try:
        step()
    finally:
        taken = meter.end()
    assert taken is not None
    return taken


def _device(asked: Any) -> torch.device:
    """The device of that name: one that bytes can be counted on."""
    try:
        where = torch.device(asked) if isinstance(asked, str | torch.device) else None
    except RuntimeError:
        where = None
    if where is None or where.type not in ("cpu", "cuda"):
        raise LowtideError(f'device={asked!r} is not known to measure; it counts bytes on "cpu" and "cuda"')
    if where.type == "cuda" and (where.index or 0) >= torch.cuda.device_count():
        raise LowtideError(
            f"device={asked!r} is not there: torch sees {torch.cuda.device_count()} CUDA devices"
        )
    return where


def _default_device() -> torch.device:
    on_cuda = torch.cuda.is_available() and torch.cuda.is_initialized() and torch.cuda.memory_allocated()
    return torch.device("cuda" if on_cuda else "cpu")
