"""The memory that a plan counts on before its first step: what is wholly free goes back, an arena comes."""

from __future__ import annotations

import torch

from ..console.log import log
from ..devices.arena import lay_arena
from ..plans.planned_step import Plan
from ..units import format_bytes

__all__ = ["prepare"]


def prepare(plan: Plan) -> None:
    """Have the allocator as the plan's replay begins."""
    if plan.reserved is None:
        return
    device = torch.device(plan.graph.device)
    if not lay_arena(device, plan.arena):
        log.warning(
            f"{device} has no {format_bytes(plan.arena)} free at once, which the plan counts on: other "
            "processes, or another stream, hold them. The step runs without, and may reserve more than "
            f"{format_bytes(plan.peak)}"
        )
