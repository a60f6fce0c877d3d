"""The memory that a plan counts on before its first step: what is wholly free goes back, an arena comes."""

from __future__ import annotations

from typing import Any

import torch

from ..console.log import log
from ..devices.arena import lay_arena, sets_aside, state_is_in
from ..devices.optimizers import each_optimizer, levels
from ..devices.reserved import coming_state
from ..plans.planned_step import Plan
from ..units import format_bytes

__all__ = ["let_state_come", "prepare"]


def prepare(plan: Plan) -> None:
    """Have the allocator as the plan's replay begins."""
    if plan.reserved is None:
        return
    device = torch.device(plan.graph.device)
    # State that comes inside of the backward has no room aside: it would be there twice.
    state = [] if plan.graph.updaters else coming_state(plan.graph, torch.cuda.memory_allocated(device))
    if not lay_arena(device, plan.arena, state):
        log.warning(
            f"{device} has no {format_bytes(plan.arena)} free at once, which the plan counts on: other "
            "processes, or another stream, hold them. The step runs without, and may reserve more than "
            f"{format_bytes(plan.peak)}"
        )


def let_state_come(announced: Any) -> None:
    """Let go of the room for state that has come unseen, from an optimizer that compiled code has stepped."""
    optimizers = (level for one in each_optimizer(announced) for level in levels(one)) if sets_aside() else ()
    if any(getattr(one, "state", None) for one in optimizers):
        state_is_in()
