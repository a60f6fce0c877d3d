"""What is taken between two moments: peak bytes and seconds, on each device.

On CUDA they are the caching allocator's own statistics, on the CPU those of a tracker of live storages.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import ExitStack
from typing import NamedTuple

import torch

from .tracker import collectives_tell, generated_code_tells, live_storages, resized_storages_tell

__all__ = ["Measurement", "Meter"]


class _Taken(NamedTuple):
    peak: int
    seconds: float


class Measurement(_Taken):
    """What a step took: peak bytes and seconds; `reserved` are the bytes that CUDA's allocator has reserved.

    >>> import lowtide, torch
    >>> peak, seconds = lowtide.measure(lambda: torch.ones(1000).sum(), device="cpu")
    >>> peak
    4004
    """

    reserved: int | None = None


class Meter:
    """Measures from `begin` to `end`; on CUDA the allocator's peak statistics are reset.

    On the CPU every operator is counted meanwhile, so `end` must be called whatever happens.
    """

    def __init__(self) -> None:
        self.device: torch.device | None = None
        self.start = 0.0
        self.tracker: live_storages | None = None
        self.under_way = ExitStack()

    def begin(self, device: torch.device, resident: Iterable[torch.Tensor] = ()) -> None:
        """Measure from here; on the CPU `resident` tensors count even if nothing touches them."""
        self.device = device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            self.start = time.perf_counter()
            return
        self.tracker = live_storages()
        for tensor in resident:
            self.tracker.give(tensor)
        for tells in (generated_code_tells, resized_storages_tell, collectives_tell):
            self.under_way.enter_context(tells(self.tracker))
        self.start = time.perf_counter()
        self.under_way.enter_context(self.tracker.mode)

    def end(self) -> Measurement | None:
        """What was taken since `begin`; None where nothing is measured."""
        device, self.device = self.device, None
        if device is None:
            return None
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            seconds = time.perf_counter() - self.start
            taken = Measurement(torch.cuda.max_memory_allocated(device), seconds)
            taken.reserved = torch.cuda.max_memory_reserved(device)
            return taken
        seconds = time.perf_counter() - self.start
        self.under_way.close()
        tracker, self.tracker = self.tracker, None
        assert tracker is not None
        return Measurement(tracker.peak, seconds)
