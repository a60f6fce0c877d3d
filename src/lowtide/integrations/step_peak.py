"""The measured peak of a step whose forward and backward are called by somebody else."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack

import torch

from ..measuring.tracker import generated_code_tells, live_storages

__all__ = ["StepPeak"]


class StepPeak:
    """Measures from `begin` to `end`: by CUDA's allocator, whose peak is reset, or a tracker of the CPU's."""

    def __init__(self) -> None:
        self.device: torch.device | None = None
        self.tracker: live_storages | None = None
        self.under_way = ExitStack()

    def begin(self, device: torch.device, resident: Iterable[torch.Tensor]) -> None:
        """Measure from here on; on the CPU `resident` tensors count even if nothing touches them."""
        self.device = device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            return
        self.tracker = live_storages(device)
        for tensor in resident:
            self.tracker.give(tensor)
        self.under_way.enter_context(generated_code_tells(self.tracker))
        self.under_way.enter_context(self.tracker.mode)

    def end(self) -> int | None:
        """The peak since `begin`; None where nothing was measured."""
        device, self.device = self.device, None
        self.under_way.close()
        if device is None:
            return None
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            return torch.cuda.max_memory_allocated(device)
        assert self.tracker is not None
        return self.tracker.peak
