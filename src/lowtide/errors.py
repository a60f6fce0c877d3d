"""What Lowtide raises.

    LowtideError
    ├── BudgetError            the budget cannot be read (also a ValueError)
    │   └── BudgetTooSmall     it can be read, but no schedule fits under it
    ├── CaptureError           the training step could not be captured
    │   ├── GraphBreak         the step is not one graph
    │   └── NothingToTrain     no output depends on anything that needs a gradient
    ├── ScheduleError          the simulator refused a schedule
    ├── FormatError            a graph, schedule, timeline or plan file is malformed (also a ValueError)
    ├── OutOfTime              no plan was found in `planning_seconds`
    ├── PlanMismatch           a plan made for another model or other shapes
    ├── RanksDiffer            ranks of one step have different ones, or one of them failed
    └── UnsupportedBackward    double backward, retain_graph=True, a gradient that was not planned for, or
                               an input that changed since the forward and is recomputed from

Every message says what was asked, what is possible, the cause by a name the user knows and the next
step. Whatever is raised, the model, its gradients and its files are as they were.
"""

from __future__ import annotations


class LowtideError(Exception):
    """The root of everything that Lowtide raises on purpose.

    >>> import lowtide
    >>> try:
    ...     lowtide.Plan.from_json("{}")
    ... except lowtide.LowtideError as error:
    ...     print(type(error).__name__)
    FormatError
    """


class BudgetError(LowtideError, ValueError):
    """A budget that cannot be read, or that the device does not have.

    >>> import lowtide, torch
    >>> lowtide.cap(torch.nn.Linear(4, 4), "8 apples")
    Traceback (most recent call last):
    lowtide.errors.BudgetError: budget '8 apples' has the unknown unit 'apples'; ...
    """


class BudgetTooSmall(BudgetError):
    """No schedule was found under the budget.

    `budget` is what was asked, `smallest` the least peak that was found, `parts` where those bytes are.

    >>> import lowtide, torch
    >>> try:
    ...     lowtide.plan(torch.nn.Linear(64, 64), torch.ones(100, 64), budget="1KiB")
    ... except lowtide.BudgetTooSmall as error:
    ...     print(error.smallest, error.parts["parameters"])
    144648 16640
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
    """The training step could not be captured as a joint graph.

    `may_be_users` says that the capture failed where the step itself would raise an error, `for_good` that no
    later call can be captured either.

    >>> import lowtide, torch
    >>> try:
    ...     lowtide.plan(lambda x: x[x > 0].sum(), torch.ones(8, requires_grad=True))
    ... except lowtide.CaptureError as error:
    ...     print(type(error).__name__)
    GraphBreak
    """

    may_be_users = False
    for_good = False


class GraphBreak(CaptureError):
    """The step is more than one graph; the message names the user's line.

    >>> import lowtide, torch
    >>> def step(x):
    ...     print("here")
    ...     return x.sum()
    >>> lowtide.plan(step, torch.ones(8, requires_grad=True))
    Traceback (most recent call last):
    lowtide.errors.GraphBreak: the step is not one graph: torch cannot capture ...
    """


class NothingToTrain(CaptureError):
    """No output of the step needs a gradient.

    >>> import lowtide, torch
    >>> lowtide.plan(torch.nn.Linear(4, 4).requires_grad_(False), torch.ones(2, 4))
    Traceback (most recent call last):
    lowtide.errors.NothingToTrain: no output of the step depends on a parameter or input that ...
    """


class ScheduleError(LowtideError):
    """A schedule that the simulator refuses; `step` is the index of the first bad one.

    >>> import lowtide
    >>> lowtide.simulate(lowtide.Graph((), ()), lowtide.Schedule((lowtide.Run("mul"),), ()))
    Traceback (most recent call last):
    lowtide.errors.ScheduleError: step 0 (forward): runs 'mul', which is not an op of the graph
    """

    def __init__(self, message: str, *, step: int | None = None) -> None:
        super().__init__(message)
        self.step = step


class FormatError(LowtideError, ValueError):
    """A malformed file; the message names the field.

    >>> import lowtide
    >>> lowtide.Graph.from_json('{"lowtide": "graph"}')
    Traceback (most recent call last):
    lowtide.errors.FormatError: field "version": expected a whole number, found None
    """


class OutOfTime(LowtideError):  # named for what is the matter, as the others are
    """No plan was found in the time that planning may take.

    >>> import lowtide, torch
    >>> lowtide.plan(torch.nn.Linear(48, 48), torch.ones(96, 48), budget="99%", method="rotor",
    ...              planning_seconds=1e-9)
    Traceback (most recent call last):
    lowtide.errors.OutOfTime: no plan was found in planning_seconds=1e-09 s; take more ...
    """


class PlanMismatch(LowtideError):
    """A plan that belongs to another model or to other shapes.

    >>> import lowtide, torch
    >>> plan = lowtide.plan(torch.nn.Linear(4, 4), torch.ones(3, 4), budget="1MiB")
    >>> model = lowtide.cap(torch.nn.Linear(4, 4), plan=plan)
    >>> model(torch.ones(2, 4))
    Traceback (most recent call last):
    lowtide.errors.PlanMismatch: the plan was made for another step: ...
    """


class RanksDiffer(LowtideError):
    """Ranks that must run the same schedule ask for different ones, or one of them failed or did not come.

    Every rank raises it: a collective that only some of them ran would never end.

    >>> import lowtide
    >>> raise lowtide.RanksDiffer("they differ in the budget: 79% on rank 1, 80% on rank 0")
    Traceback (most recent call last):
    lowtide.errors.RanksDiffer: they differ in the budget: 79% on rank 1, ...
    """


class UnsupportedBackward(LowtideError):
    """A way of calling backward that a plan does not support.

    >>> import lowtide, torch
    >>> model = lowtide.cap(torch.nn.Linear(4, 4), "1MiB")
    >>> model(torch.ones(2, 4)).sum().backward(retain_graph=True)
    Traceback (most recent call last):
    lowtide.errors.UnsupportedBackward: backward was called with retain_graph=True ...
    """
