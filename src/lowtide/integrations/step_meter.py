"""The peak of one training step that somebody else runs: from a callback before it to a callback after it."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack

import torch

from ..measuring.tracker import generated_code_tells, live_storages

__all__ = ["StepMeter"]


class StepMeter:
    """Measures from `start` to `stop`, as `lowtide.measure` does; on CUDA it resets the peak statistics.

    On the CPU every operator is counted meanwhile, so `stop` must be called whatever happens.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.tracker: live_storages | None = None
        self.running = ExitStack()

    def start(self, resident: Iterable[torch.Tensor]) -> None:
        """Measure from here; on the CPU `resident` counts even if it is not touched."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        self.tracker = live_storages()
        for tensor in resident:
            self.tracker.give(tensor)
        self.running.enter_context(generated_code_tells(self.tracker))
        self.running.enter_context(self.tracker.mode)

    def stop(self) -> int:
        """The peak since `start`, in bytes."""
        if self.device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self.device))
        self.running.close()
        return 0 if self.tracker is None else self.tracker.peak
