"""The measured peak of a step whose forward and backward are called by somebody else."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import ExitStack

import torch

from ..measuring.measurement import Measurement
from ..measuring.tracker import generated_code_tells, live_storages

__all__ = ["StepPeak"]


class StepPeak:
    """Measures from `begin` to `end`: by CUDA's allocator, whose peak is reset, or a tracker of the CPU's."""

    def __init__(self) -> None:
        self.device: torch.device | None = None
        self.start = 0.0
        self.tracker: live_storages | None = None
        self.under_way = ExitStack()

    def begin(self, device: torch.device, resident: Iterable[torch.Tensor]) -> None:
        """Measure from here on; on the CPU `resident` tensors count even if nothing touches them."""
        self.device, self.start = device, time.perf_counter()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            return
        self.tracker = live_storages(device)
        for tensor in resident:
            self.tracker.give(tensor)
        self.under_way.enter_context(generated_code_tells(self.tracker))
        self.under_way.enter_context(self.tracker.mode)

    def end(self) -> Measurement | None:
        """What was taken since `begin`; None where nothing was measured."""
        device, self.device = self.device, None
        self.under_way.close()
        if device is None:
            return None
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            return Measurement(torch.cuda.max_memory_allocated(device), time.perf_counter() - self.start)
        tracker, self.tracker = self.tracker, None
        assert tracker is not None
        return Measurement(tracker.peak, time.perf_counter() - self.start)
