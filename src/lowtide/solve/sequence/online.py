"""Loops of unknown length: which states to keep while the loop runs, and how to differentiate it afterwards.

Problem: a loop runs until a condition stops it. At every state it must be decided, with no knowledge of how
many steps will follow, whether to keep it and which kept one to free for it, so that few steps are recomputed
wherever the loop stops. Slots are those of `forward_count` with "hidden": one is the start state's, and the
state that the loop is at lies in the workspace.

Method: online (or dynamic) checkpointing. Wang, Moin, Iaccarino, "Minimal Repetition Dynamic Checkpointing
Algorithm for Unsteady Adjoint Calculation" (2009) and Stumm, Walther, "New Algorithms for Optimal Online
Checkpointing" (2010). Let R be the reruns of a step that are allowed by now, and β(s, r) = binom(s+r, s). The
part from one kept state to the next is solved with the s slots that are free by then, and has at most R
reruns of each step if it is of at most β(s, R-1) steps. A kept state is dispensable if the part that it would
leave is no longer than that. (Wang et al. mark such states by levels; lengths hold for any order of freeing
them.) When the slots are full, a dispensable state makes room; where there is none the new state is passed
by, and once more than R steps lie after the last kept state, R becomes R + 1. What is left open is which
dispensable state to free:

- The first one: every part is filled to its β(s, R-1) steps, and R stays the least there is for a loop of
  this length, the one with β(slots, R-1) ≤ steps < β(slots, R). The number of runs is the least too, but only
  while R ≤ 2: later, a rise of R soon frees all old states, and the runs are up to 30 % more (50 slots).
- The last one: old states are freed no sooner than they must be. But parts are left that are not full, and
  R is one above the least for the longer loops of a range.

So the first one is freed while R ≤ 2. From there on it is the last one, and only when more than R steps lie
after the last kept state.

Complexity: O(slots) per step at worst; on average over a million steps it looks at less than two kept states
per step, up to 200 slots.

Limits: equal steps. If the length were known, the best states to keep would take forward_count(steps + 1,
slots) - 1 runs. A loop takes just as many while steps < β(slots, 2), each step being rerun twice at most, and
up to 10 % more beyond (7 % from 5 slots on). `forward_count(steps, slots)` itself is less by the reruns of
one step: it goes backward straight from the last step, whereas a loop that stops has not recorded it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import comb
from typing import NamedTuple

from ...errors import LowtideError
from .actions import Action, Pop, Task, stream
from .table import forward_count, read_problem

__all__ = ["Choice", "Online", "finish", "online_count"]

TIGHT = 2
"""The most recomputations of a step for which parts are filled to their last step."""


class Choice(NamedTuple):
    """Whether to keep a state, and which kept one to free before, if any."""

    keep: bool
    free: int | None


class Online:
    """Chooses the states to keep of a loop whose length nobody knows.

    `leave` is told of each state before the loop runs on from it. Wherever the loop stops, `kept` are the
    states for `finish` to go on from, and no step is recomputed more than `reruns` times.

        >>> online = Online(slots=2)
        >>> [online.leave(state).keep for state in range(4)]
        [True, True, False, True]
        >>> online.kept, online.reruns
        ((0, 3), 2)
    """

    def __init__(self, slots: int) -> None:
        self.slots = read_problem(0, slots).slots
        self.steps = 0
        self.reruns = 1
        self._kept: list[int] = []
        self._first = 1  # the first place of a state that may be dispensable

    @property
    def kept(self) -> tuple[int, ...]:
        """The states that are kept now, in order."""
        return tuple(self._kept)

    def leave(self, state: int) -> Choice:
        """What to do with a state before its step runs; states are left one by one, from state 0."""
        if state != self.steps:
            raise LowtideError(
                f"state={state!r} is left, but state {self.steps} is next: they come one by one"
            )
        self.steps += 1
        if len(self._kept) < self.slots:
            self._kept.append(state)
            return Choice(True, None)
        place = self._dispensable(state)
        if place is not None:
            self._kept.append(state)
            return Choice(True, self._kept.pop(place))
        if self.steps - self._kept[-1] > self.reruns:
            self.reruns += 1
            self._first = 1
        return Choice(False, None)

    def _dispensable(self, state: int) -> int | None:
        """The place of the kept state that makes room for this one, if it is to be kept."""
        if self.reruns <= TIGHT:
            places = range(self._first, self.slots)
        elif self.steps - self._kept[-1] > self.reruns:
            places = range(self.slots - 1, 0, -1)
        else:
            return None
        self._first = self.slots
        for place in places:
            if self._joins(place, state):
                self._first = place
                return place
        return None

    def _joins(self, place: int, state: int) -> bool:
        """Whether the parts before and after a kept state make one that has few enough steps."""
        stop = self._kept[place + 1] if place + 1 < self.slots else state
        free = self.slots - place + 1
        return stop - self._kept[place - 1] <= comb(free + self.reruns - 1, free)


def finish(kept: Sequence[int], steps: int, slots: int) -> Iterator[Action]:
    """The actions that differentiate a loop of `steps` steps which has run once and kept these states.

    The last part, from the last kept state on, comes first, then its state is freed for the parts before it.
    Each part is solved as a sequence of its own, with the least number of runs: every step runs once more at
    least, the last one of the loop too. The start state is loaded like any other and stays.

        >>> list(finish([0], 1, slots=1))
        [Load(state=0), Forward(start=0, stop=1), Backward(step=0)]
    """
    problem = read_problem(steps, slots)
    steps, slots = problem.steps, problem.slots
    _check(kept, steps, slots)
    tasks: list[Task] = []
    for place, (start, length) in enumerate(_parts(kept, steps)):
        tasks += [Pop(start)] if place else []
        tasks.append((start, length, slots - place))
    return stream(problem, tasks, at=steps)


def online_count(steps: int, slots: int) -> int:
    """The number of forward runs of a loop that stops after n steps, first runs included.

    >>> online_count(1000, 50), forward_count(1000, 50)
    (2950, 2948)
    """
    steps, slots = read_problem(steps, slots)[:2]
    online = Online(slots)
    for state in range(steps):
        online.leave(state)
    parts = enumerate(_parts(online.kept, steps))
    return steps + sum(forward_count(length, slots - place) for place, (_, length) in parts)


def _parts(kept: Sequence[int], steps: int) -> list[tuple[int, int]]:
    """The start and the number of steps of each part."""
    return [(start, stop - start) for start, stop in pairwise([*kept, steps])]


def _check(kept: Sequence[int], steps: int, slots: int) -> None:
    """Raise if a loop can not have kept these states; one that did not run may have kept none."""
    if len(kept) > slots:
        raise LowtideError(f"{len(kept)} states are kept, above slots={slots}")
    if not kept and not steps:
        return
    if not kept or kept[0] != 0:
        raise LowtideError(f"kept={[*kept[:3]]} does not begin with the start state 0")
    if kept[-1] > steps:
        raise LowtideError(f"state {kept[-1]} is kept, above steps={steps}")
    for before, state in pairwise(kept):
        if before >= state:
            raise LowtideError(f"state {before} is kept before state {state}: kept states must rise")
