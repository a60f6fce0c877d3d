"""The first step of a compiled plan on a GPU, where libraries take memory of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...plans.planned_step import Plan

__all__ = ["FirstStep"]


class FirstStep:
    """The first step of a compiled plan on a GPU, where libraries take memory of their own: it is watched.

    `over` is how far the device's allocator was above the budget then.
    """

    def __init__(self) -> None:
        self.plan: Plan | None = None
        self.over = 0
        self.done = False

    def watching(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """The function of the step, with the allocator's peak counted from its first call on."""
        device = self.device
        if device is None:
            return run

        def call(*args: Any) -> Any:
            if not self.done:
                torch.cuda.reset_peak_memory_stats(device)
            return run(*args)

        return call

    @property
    def device(self) -> torch.device | None:
        """The GPU that is watched."""
        where = torch.device("cpu" if self.plan is None else self.plan.graph.device)
        return where if where.type == "cuda" else None

    def look(self) -> None:
        """Called after the backward."""
        if self.done or self.plan is None or self.device is None:
            return
        self.done = True
        if self.plan.budget is not None:
            self.over = max(0, torch.cuda.max_memory_allocated(self.device) - self.plan.budget)
