"""How many forward runs a sequence of equal steps takes, and where to store the next state: numbers only.

Problem: `steps` equal steps, one after the other, are differentiated with `slots` slots to store states in.
How often must a step run forward, at least, and which state is the next one to store?

Method: binomial checkpointing. Griewank, "Achieving logarithmic growth of temporal and spatial complexity in
reverse automatic differentiation" (1992) has the idea and its program *treeverse*; Griewank and Walther,
"Algorithm 799: revolve" (2000) the least number of runs for any number of steps. Gruslys, Munos, Danihelka,
Lanctot, Graves, "Memory-Efficient Backpropagation Through Time" (2016) found the same recurrence ("hidden",
their BPTT-HSM) and two more ("internal", BPTT-ISM; "mixed", BPTT-MSM). A *hidden* state is what a step hands
on; an *internal* state is all that the backward of a step reads, the state that it hands on included. From a
start state, y steps run and the state that they lead to is stored; the right part is solved with the slots
that are left, then the left part with all of them. With C(0, m) = 0 and C(t, 1) = t(t+1)/2:

- hidden: C(t, m) = min over 1 ≤ y < t of  y + C(t-y, m-1) + C(y, m),  and C(1, m) = 1;
- internal: C(t, m) = min over 1 ≤ y ≤ t of  y + C(t-y, m-1) + C(y-1, m);
- mixed: the lesser of the two, where an internal state takes α slots, or β ≤ α when the state it starts from
  is stored already (y = 1).

Let β(s, r) = binom(s+r, s), r the least with β(s, r) ≥ l, and p(l, s) = r·l - binom(s+r, s+1). Then the first
is p(t, m) + t and the second p(t+1, m): p is the count of revolve, the best y are
those with β(s, r-2) ≤ y ≤ β(s, r-1) and β(s-1, r-1) ≤ l-y ≤ β(s-1, r), and no table is needed. The third is
not convex in t and takes a table.

Complexity: O(log steps) for hidden and internal, in exact integers; O(steps² · slots) for mixed, in numpy.

Limits: equal steps. The table of "mixed" takes up to 16 · steps · slots bytes, and as much while it is made.
"""

from __future__ import annotations

from functools import lru_cache
from math import comb
from operator import index
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ...errors import LowtideError

__all__ = ["Keep", "Problem", "Split", "forward_count", "read_problem"]

Keep: TypeAlias = Literal["hidden", "internal", "mixed"]
What: TypeAlias = Literal["hidden", "internal"]
KEEPS = ("hidden", "internal", "mixed")
NEVER = 1 << 60
"""More forward runs than any sequence takes, and still an exact sum of two in 64 bits."""


MOST_CELLS = 1 << 24


class Split(NamedTuple):
    """Run `ahead` steps, then store a state of that kind, which takes `slots` slots."""

    ahead: int
    what: What
    size: int


class Problem(NamedTuple):
    """What is asked: checked numbers, with `internal` and `held` the slots that an internal state takes."""

    steps: int
    slots: int
    keep: Keep
    internal: int
    held: int

    def split(self, steps: int, slots: int) -> Split | None:
        """What to store next in a part of the sequence; None where there is no slot for it."""
        if self.keep == "internal":
            return Split(_first_part(steps + 1, slots), "internal", 1)
        if steps == 1 or slots == 1:
            return None
        if self.keep == "hidden":
            return Split(_first_part(steps, slots), "hidden", 1)
        return _mixed_split(self, steps, min(slots, self.most_slots))

    @property
    def most_slots(self) -> int:
        """More slots than these change nothing."""
        return min(self.slots, self.internal * self.steps + 1)


def forward_count(
    steps: int, slots: int, *, keep: Keep = "hidden", internal: int = 1, held: int | None = None
) -> int:
    """The least number of forward runs that differentiate a sequence, first runs included.

    With `keep="hidden"` a slot takes the state that a step hands on, and one slot is the start state's; with
    "internal" it takes all that the backward of a step reads, and the start state is free; with "mixed" slots
    count hidden states, the start state among them, and an internal state takes `internal` of them, or `held`
    (the same unless given) when the state it starts from is stored already. One step at a time is worked on
    beside the slots.

        >>> forward_count(1000, 50), forward_count(1000, 50, keep="internal")
        (2948, 1950)
        >>> forward_count(1000, 100, keep="mixed", internal=5, held=4)
        1988
    """
    problem = read_problem(steps, slots, keep=keep, internal=internal, held=held)
    if not problem.steps:
        return 0
    if keep == "mixed":
        return int(_mixed(problem)[problem.steps, problem.most_slots])
    if keep == "internal":
        return _advances(problem.steps + 1, problem.slots)
    return _advances(problem.steps, problem.slots) + problem.steps


def read_problem(
    steps: int, slots: int, *, keep: Keep = "hidden", internal: int = 1, held: int | None = None
) -> Problem:
    """The checked form of the arguments; raises naming the one that is wrong."""
    if keep not in KEEPS:
        raise LowtideError(f"keep={keep!r} is not known; choose one of {', '.join(KEEPS)}")
    internal = _whole("internal", internal, least=1)
    held = internal if held is None else _whole("held", held, least=1)
    if held > internal:
        raise LowtideError(
            f"held={held} is above internal={internal}: a state whose start is stored already takes no more "
            "slots than any other"
        )
    return Problem(_whole("steps", steps, least=0), _whole("slots", slots, least=1), keep, internal, held)


def _whole(name: str, number: Any, *, least: int) -> int:
    try:
        whole = index(number)
    except TypeError:
        raise LowtideError(f"{name}={number!r} is not a whole number") from None
    if isinstance(number, bool) or whole < least:
        raise LowtideError(f"{name}={number!r} must be a whole number of at least {least}")
    return whole


def _advances(length: int, slots: int) -> int:
    """p(l, s): the runs that lead to each of `length` states in turn, from the last to the first."""
    repeats = _repeats(length, slots)
    return repeats * length - comb(slots + repeats, slots + 1)


def _repeats(length: int, slots: int) -> int:
    """The least r with binom(slots + r, slots) ≥ length."""
    low, high = -1, 0
    while comb(slots + high, slots) < length:
        low, high = high, 2 * high + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if comb(slots + middle, slots) < length else (low, middle)
    return high


@lru_cache(maxsize=1 << 14)
def _first_part(length: int, slots: int) -> int:
    """The largest of the best y for p(length, slots)."""
    repeats = _repeats(length, slots)
    return min(comb(slots + repeats - 1, slots), length - comb(slots + repeats - 2, slots - 1))


def _mixed(problem: Problem) -> NDArray[np.int64]:
    """A table of "mixed" that holds the problem; its width is rounded up, so that problems share tables."""
    steps, slots = problem.steps, problem.most_slots
    if (steps + 1) * (slots + 1) > MOST_CELLS:
        raise LowtideError(
            f'keep="mixed" takes a table of {steps} steps by {slots} slots, above {MOST_CELLS} cells; '
            'make one step of several, or use keep="hidden" or "internal", which take none'
        )
    return _table(steps, 1 << slots.bit_length(), problem.internal, problem.held)


@lru_cache(maxsize=4)
def _table(steps: int, slots: int, alpha: int, beta: int) -> NDArray[np.int64]:
    """C[t, m] of "mixed" for all t up to `steps` and m up to `slots`."""
    count = np.full((steps + 1, slots + 1), NEVER, dtype=np.int64)
    count[0] = 0
    count[:, 1] = np.arange(steps + 1) * np.arange(1, steps + 2) // 2
    count[1, 1:] = 1
    ahead = np.zeros_like(count)  # y + C(y, m)
    ahead[1] = 1 + count[1]
    for t in range(2, steps + 1):
        row, lefts = count[t], ahead[1:t]
        hidden = lefts[:, 2:] + count[t - 1 : 0 : -1, 1:-1]
        row[2:] = hidden.min(axis=0)
        if beta <= slots:
            row[beta:] = np.minimum(row[beta:], 1 + count[t - 1, : slots + 1 - beta])
        if alpha <= slots:
            internal = lefts[:, alpha:] + count[t - 2 :: -1, : slots + 1 - alpha]
            row[alpha:] = np.minimum(row[alpha:], 1 + internal.min(axis=0))
        ahead[t] = t + row
    return count


@lru_cache(maxsize=1 << 14)
def _mixed_split(problem: Problem, steps: int, slots: int) -> Split:
    """The best next state of "mixed": where several are, the one that takes the fewest slots."""
    count = _mixed(problem)
    least = int(count[steps, slots])
    for ahead in range(1, steps + 1):
        if ahead < steps and ahead + count[ahead, slots] + count[steps - ahead, slots - 1] == least:
            return Split(ahead, "hidden", 1)
        size = problem.held if ahead == 1 else problem.internal
        if size <= slots and ahead + count[ahead - 1, slots] + count[steps - ahead, slots - size] == least:
            return Split(ahead, "internal", size)
    raise AssertionError("the table holds the cost of a split that is not there")
