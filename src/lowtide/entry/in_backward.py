"""Whether an optimizer can step inside of the backward, asked before anything is captured."""

from __future__ import annotations

from ..devices.per_tensor import refuse_joint_updates
from ..errors import LowtideError
from ..options import Options

__all__ = ["refuse_unless_it_can_step"]


def refuse_unless_it_can_step(options: Options) -> None:
    """Refuse `step_in_backward` without an optimizer, or with one whose updates are not per tensor."""
    if not options.step_in_backward:
        return
    if options.optimizer is None:
        raise LowtideError(
            "step_in_backward=True needs the optimizer that steps, as in lowtide.cap(model, budget, "
            "optimizer=optimizer, step_in_backward=True)"
        )
    refuse_joint_updates(options.optimizer)
