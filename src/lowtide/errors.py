"""What Lowtide raises.

    LowtideError
    ├── BudgetError            the budget cannot be read (also a ValueError)
    │   └── BudgetTooSmall     it can be read, but no schedule fits under it
    ├── CaptureError           the training step could not be captured
    │   ├── GraphBreak         the step is not one graph
    │   └── NothingToTrain     no output depends on anything that needs a gradient
    ├── ScheduleError          the simulator refused a schedule
    ├── FormatError            a graph, schedule, timeline or plan file is malformed (also a ValueError)
    ├── PlanMismatch           a plan made for another model or other shapes
    └── UnsupportedBackward    double backward, retain_graph=True, or a gradient that was not planned for

Every message says what was asked, what is possible, the cause by a name the user knows and the next
step. Whatever is raised, the model, its gradients and its files are as they were.
"""

from __future__ import annotations


class LowtideError(Exception):
    """The root of everything that Lowtide raises on purpose."""


class BudgetError(LowtideError, ValueError):
    """A budget that cannot be read, or that the device does not have."""


class BudgetTooSmall(BudgetError):
    """No schedule was found under the budget.

    `budget` is what was asked, `smallest` the least peak that was found, `parts` where those bytes are.
    """

    def __init__(
        self, message: str, *, budget: int, smallest: int, parts: dict[str, int] | None = None
    ) -> None:
        super().__init__(message)
        self.budget = budget
        self.smallest = smallest
        self.parts = dict(parts or {})

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_too_small, (str(self), self.budget, self.smallest, self.parts)


def _rebuild_too_small(message: str, budget: int, smallest: int, parts: dict[str, int]) -> BudgetTooSmall:
    return BudgetTooSmall(message, budget=budget, smallest=smallest, parts=parts)


class CaptureError(LowtideError):
    """The training step could not be captured as a joint graph."""


class GraphBreak(CaptureError):
    """The step is more than one graph; the message names the user's line.

    `may_be_users` says that the capture failed where the step itself would raise an error.
    """

    may_be_users = False


class NothingToTrain(CaptureError):
    """No output of the step needs a gradient."""


class ScheduleError(LowtideError):
    """A schedule that the simulator refuses; `step` is the index of the first bad one."""

    def __init__(self, message: str, *, step: int | None = None) -> None:
        super().__init__(message)
        self.step = step


class FormatError(LowtideError, ValueError):
    """A malformed file; the message names the field."""


class PlanMismatch(LowtideError):
    """A plan that belongs to another model or to other shapes."""


class UnsupportedBackward(LowtideError):
    """A way of calling backward that a plan cannot serve."""
