"""The actions that differentiate a sequence of equal steps, and a replay that checks them.

Problem: differentiate t equal steps (an unrolled recurrent network, equal blocks) with m slots for states,
running steps forward as seldom as possible.

Method: Gruslys, Munos, Danihelka, Lanctot, Graves, "Memory-Efficient Backpropagation Through Time" (2016);
`table` holds the recurrences, their closed forms and `forward_count`. Here the policy becomes a
stream of small actions: run y steps forward, push the state that they lead to, solve the right part, pop,
and solve the left part from the state before. `replay` checks any such stream.

Complexity: O(1) per action; about two to four actions per step and level of recomputation.

Limits: equal steps and one start state. `method` brings them to graphs, whose steps are never quite equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NoReturn, TypeAlias

from ...errors import ScheduleError
from .table import Keep, Problem, read_problem

__all__ = [
    "Action",
    "Backward",
    "Forward",
    "Load",
    "Pop",
    "Push",
    "Task",
    "actions",
    "replay",
    "schedule",
    "stream",
]


@dataclass(frozen=True, slots=True)
class Forward:
    """Run steps `start` to `stop` - 1 from state `start`: state `stop` and what the last one left remain."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Backward:
    """Run the backward of a step, from its internal state."""

    step: int


@dataclass(frozen=True, slots=True)
class Load:
    """Go on from a stored state."""

    state: int


@dataclass(frozen=True, slots=True)
class Push:
    """Store hidden state `at`, or the internal state of step `at`, which state `at + 1` is part of."""

    at: int
    what: Literal["hidden", "internal"] = "hidden"


@dataclass(frozen=True, slots=True)
class Pop:
    """Free what was stored last."""

    at: int
    what: Literal["hidden", "internal"] = "hidden"


Action: TypeAlias = Forward | Backward | Load | Push | Pop

Task: TypeAlias = Action | tuple[int, int, int]
"""What is left to do: an action, or a part of the sequence as (start, steps, slots)."""


def schedule(
    steps: int, slots: int, *, keep: Keep = "hidden", internal: int = 1, held: int | None = None
) -> list[Action]:
    """The actions that differentiate a sequence with `forward_count` forward runs, as a list.

    Steps and states count from 0: step i leads from state i to state i + 1.

        >>> schedule(1, 1)
        [Forward(start=0, stop=1), Backward(step=0)]
    """
    return list(actions(steps, slots, keep=keep, internal=internal, held=held))


def actions(
    steps: int, slots: int, *, keep: Keep = "hidden", internal: int = 1, held: int | None = None
) -> Iterator[Action]:
    """The actions of `schedule` one by one: a sequence of any length takes no more memory than its slots."""
    problem = read_problem(steps, slots, keep=keep, internal=internal, held=held)
    return stream(problem, [(0, problem.steps, problem.slots)], at=0)


def stream(problem: Problem, tasks: Iterable[Task], *, at: int) -> Iterator[Action]:
    """The actions of tasks, the last task first, where the workspace is at state `at`."""
    todo = [*tasks]
    while todo:
        task = todo.pop()
        if not isinstance(task, tuple):
            yield task
            continue
        start, steps, slots = task
        if not steps:
            continue
        if at != start:
            yield Load(start)
        split = problem.split(steps, slots)
        at = start + (split.ahead if split else steps)
        yield Forward(start, at)
        if split is None:
            todo.append((start, steps - 1, slots))
            yield Backward(at - 1)
        elif split.what == "hidden":
            yield Push(at)
            todo += [(start, split.ahead, slots), Pop(at), (at, steps - split.ahead, slots - 1)]
        else:
            step = at - 1
            yield Push(step, "internal")
            todo += [(start, split.ahead - 1, slots), Pop(step, "internal"), Backward(step)]
            todo.append((at, steps - split.ahead, slots - split.size))


def replay(
    actions: Iterable[Action],
    steps: int,
    slots: int,
    *,
    keep: Keep = "hidden",
    internal: int = 1,
    held: int | None = None,
) -> int:
    """The number of forward runs of a stream of actions; raises `ScheduleError` naming the first bad one.

    Nothing is taken from how the stream was made. Checked are: a step runs from the state before it; what is
    stored is there to be stored, fits into the slots and is freed last in, first out; the backward of each
    step runs once, from the last to the first, with its internal state there: in the workspace, where the
    step has just run, or in a slot. Under `keep="internal"` only a slot will do: the slots are the memory for
    internal states, the running one included. Under the other two one slot is the start state's.
    """
    device = _Device(read_problem(steps, slots, keep=keep, internal=internal, held=held))
    for action in actions:
        device.perform(action)
    if device.left:
        device.refuse(f"the actions end, but steps 0 to {device.left - 1} did not go backward")
    return device.forwards


class _Device:
    """What is where while actions are replayed: the workspace is `state` and the internals of step `ran`."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.left = problem.steps
        self.forwards = self.performed = 0
        self.used = 0 if problem.keep == "internal" else 1
        self.state: int = 0
        self.ran: int | None = None
        self.stack: list[tuple[Push, int]] = []
        self.stored: set[Push] = set()

    def perform(self, action: Action) -> None:
        match action:
            case Forward(start, stop):
                self.forward(start, stop)
            case Backward(step):
                self.backward(step)
            case Load(state):
                if not self.holds(state):
                    self.refuse(f"loads state {state}, which is not stored")
                self.state, self.ran = state, None
            case Push():
                self.push(action)
            case Pop(at, what):
                if not self.stack or self.stack[-1][0] != Push(at, what):
                    self.refuse(f"frees the {what} state {at}, which is not what was stored last")
                entry, size = self.stack.pop()
                self.stored.remove(entry)
                self.used -= size
        self.performed += 1

    def forward(self, start: int, stop: int) -> None:
        if start != self.state:
            self.refuse(f"runs step {start}, but the workspace is at state {self.state}")
        if not start < stop <= self.problem.steps:
            self.refuse(f"runs steps {start} to {stop - 1} of {self.problem.steps}")
        self.forwards += stop - start
        self.state, self.ran = stop, stop - 1

    def backward(self, step: int) -> None:
        if step != self.left - 1:
            self.refuse(f"runs the backward of step {step}, but that of {self.left - 1} is next")
        there = Push(step, "internal") in self.stored
        if not there and (self.ran != step or self.problem.keep == "internal"):
            self.refuse(f"runs the backward of step {step}, whose internal state is not there")
        self.left = step

    def push(self, action: Push) -> None:
        if (self.ran if action.what == "internal" else self.state) != action.at:
            self.refuse(f"stores the {action.what} state {action.at}, which is not in the workspace")
        if action in self.stored or self.problem.keep not in ("mixed", action.what):
            self.refuse(f"stores the {action.what} state {action.at}, which may not be stored here")
        size = self.size(action)
        self.used += size
        if self.used > self.problem.slots:
            self.refuse(f"uses {self.used} slots of {self.problem.slots}")
        self.stack.append((action, size))
        self.stored.add(action)

    def size(self, action: Push) -> int:
        if action.what == "hidden" or self.problem.keep != "mixed":
            return 1
        return self.problem.held if self.holds(action.at) else self.problem.internal

    def holds(self, state: int) -> bool:
        return state == 0 or Push(state) in self.stored or Push(state - 1, "internal") in self.stored

    def refuse(self, reason: str) -> NoReturn:
        raise ScheduleError(f"action {self.performed}: {reason}", step=self.performed)
