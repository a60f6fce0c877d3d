"""The truth about a step: its peak bytes and its seconds, on each device.

On CUDA they are the caching allocator's own statistics, on the CPU those of a tracker of live storages.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from .tracker import collectives_tell, generated_code_tells, live_storages, resized_storages_tell

__all__ = ["Measurement", "measure"]


class Measurement(NamedTuple):
    """What a step took: peak bytes and seconds.

    >>> import lowtide, torch
    >>> peak, seconds = lowtide.measure(lambda: torch.ones(1000).sum(), device="cpu")
    >>> peak
    4004
    """

    peak: int
    seconds: float


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
    return _on_cuda(step, where) if where.type == "cuda" else _on_cpu(step, resident)


def _default_device() -> torch.device:
    on_cuda = torch.cuda.is_available() and torch.cuda.is_initialized() and torch.cuda.memory_allocated()
    return torch.device("cuda" if on_cuda else "cpu")


def _on_cuda(step: Callable[[], Any], device: torch.device) -> Measurement:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    start = time.perf_counter()
    step()
    torch.cuda.synchronize(device)
    seconds = time.perf_counter() - start
    return Measurement(torch.cuda.max_memory_allocated(device), seconds)


def _on_cpu(step: Callable[[], Any], resident: Iterable[torch.Tensor]) -> Measurement:
    tracker = live_storages()
    for tensor in resident:
        tracker.give(tensor)
    with generated_code_tells(tracker), resized_storages_tell(tracker), collectives_tell(tracker):
        start = time.perf_counter()
        with tracker.mode:
            step()
        seconds = time.perf_counter() - start
    return Measurement(tracker.peak, seconds)
