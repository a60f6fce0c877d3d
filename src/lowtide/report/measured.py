"""What was measured of a step, for the report to lay over what was predicted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import LowtideError
from ..plans.planned_step import Plan
from ..plans.schedule import Run

__all__ = ["Measured"]


@dataclass(frozen=True, slots=True)
class Measured:
    """Measured peaks in bytes and seconds of the capped and the uncapped step; None for what was not.

    `points` are bytes after steps of the schedule. `compiled` is no measurement but the peak of the buffers
    of the step's generated code.
    """

    peak: int | None = None
    seconds: float | None = None
    uncapped_peak: int | None = None
    uncapped_seconds: float | None = None
    compiled: int | None = None
    points: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, plan: Plan, found: Any = None) -> Measured:
        """What a `Verification`, a `Watched` or a `Measurement` of the plan's step says, and the plan itself.

        This module imports no torch, so they are known by their fields.
        """
        if found is None:
            return cls(compiled=plan.compiled)
        if hasattr(found, "capped") and hasattr(found, "uncapped"):
            one, other = found.capped, found.uncapped
            return cls(one.peak, one.seconds, other.peak, other.seconds, plan.compiled)
        if hasattr(found, "peak") and hasattr(found, "seconds") and not isinstance(found, Plan):
            points = tuple(sorted(getattr(found, "points", {}).items()))
            return cls(found.peak, found.seconds, compiled=plan.compiled, points=points)
        raise LowtideError(
            f"measured= takes what lowtide.verify, watch or measure returned, not a {type(found).__name__}"
        )

    @property
    def extra(self) -> float | None:
        """Measured extra time as a share of the uncapped step."""
        if not self.seconds or not self.uncapped_seconds:
            return None
        return self.seconds / self.uncapped_seconds - 1

    def told(self, plan: Plan) -> str:
        """How the points compare with the prediction, in words; nothing where there are none."""
        if not self.points:
            return ""
        steps, resident = plan.schedule.steps, plan.timeline.resident
        same = 0
        for index, size in self.points:
            step = steps[index]
            workspace = plan.graph.op[step.op].workspace if isinstance(step, Run) else 0
            same += size == resident[index] - workspace
        return f"measured after {len(self.points)} runs, {same} of them as predicted to the byte"
