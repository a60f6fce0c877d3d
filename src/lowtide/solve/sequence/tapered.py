"""Sequences in bytes: how many steps to record at once, and where to store the next state.

Problem: as in `table`, but with sizes as they are. A stored state takes `state` bytes, the recording of a
step (all that its backward reads, the state that it hands on included) takes `record` bytes, and
`room` bytes are there for both, beside one step that is being worked on. Which states are stored, which steps
are recorded, so that the fewest steps are recomputed?

Method: the "mixed" strategy of Gruslys et al. 2016, in another shape. As a recording takes no less than the
state that is part of it, it never pays to store one while steps further on are recomputed: storing states
only, and recording a *leaf* of several steps at the end of each descent, takes as few runs (compared with the
full recurrence over both kinds in the tests). With j states stored, a leaf may have L(j) = 1 + floor((room -
j·state) / record) steps: leaves taper off to the right. So

    F(t, j) = t                                               if t ≤ L(j),
    F(t, j) = min over y of  y + F(t-y, j+1) + F(y, j)        otherwise.

If every step runs at most r times, N(j, r) = N(j, r-1) + N(j+1, r) steps can be done, with N(j, 1) = L(j).
For r = 2 the best tree is known: with d the least depth such that L(j) + ... + L(d) ≥ t, the last leaf is
full and F = 2t - L(d). For r > 2, F is not convex in t (each new leaf is a little smaller than the last), so
a few y are tried: those that fill the left part with r - 1 or r - 2 runs, or the right one with r - 1. All y
are tried for short parts, and one for each part once many parts have been looked at.

Complexity: O(levels) for two runs per step; in general O(levels · r) rows and a bounded number of parts.

Limits: equal steps. For more than two runs per step and parts of more than `SHORT` steps the tree is the best
one found. Where a recording is the smaller of the two after all (a state may have a random state with it), a
mix of both can take a few runs less: at most 7 % in all cases of up to 24 steps that were tried.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from itertools import accumulate

from ...errors import LowtideError
from .table import Split

__all__ = ["Tapered", "leaf_sizes"]

SHORT = 40
"""All ways to split a part of so few steps are tried."""

MANY = 4_000
"""Parts after which only one way is tried for each."""


def leaf_sizes(steps: int, *, room: int, state: int, record: int) -> tuple[int, ...]:
    """The most steps in a leaf, by the number of states stored before it; the start state takes no bytes.

    >>> leaf_sizes(100, room=10, state=2, record=3)
    (4, 3, 3, 2, 1, 1)
    """
    deepest = (min(room // state, steps) if state else steps) if room >= 0 else -1
    return tuple(1 + (room - level * state) // max(record, 1) for level in range(deepest + 1))


class Tapered:
    """The best tree found for a number of steps and leaves: a problem as `actions` takes it.

    `slots` counts levels: all of them at the start, one less for each state that is stored.
    """

    def __init__(self, steps: int, leaves: Iterable[int]) -> None:
        self.steps = steps
        self.leaves = tuple(leaves)
        self.slots = len(self.leaves)
        self._most = _Capacity(self.leaves)
        self._found: dict[tuple[int, int], tuple[int, int]] = {}
        if self._most.passes(steps, 0) is None:
            raise LowtideError(
                f"{steps} steps cannot be differentiated in leaves of {list(self.leaves)} steps: there is "
                "room for no state beside the start state"
            )

    @property
    def forward_count(self) -> int:
        """The number of forward runs, first runs included."""
        return self._best(self.steps, 0)[0]

    def split(self, steps: int, slots: int) -> Split:
        """The next step to record, or the next state to store."""
        level = self.slots - slots
        if steps <= self.leaves[level]:
            return Split(1, "internal", 0)
        return Split(self._best(steps, level)[1], "hidden", 1)

    def _best(self, steps: int, level: int) -> tuple[int, int]:
        """The runs that a part takes, and the steps before the state that it stores first."""
        todo = [(steps, level)]
        while todo:  # no recursion: a part may be split as often as it has steps
            part = todo[-1]
            if part in self._found:
                todo.pop()
                continue
            ways = self._ways(*part)
            missing = [side for way in ways for side in way[1:] if side not in self._found]
            if missing:
                todo += missing
                continue
            counts = [(ahead + sum(self._found[side][0] for side in sides), ahead) for ahead, *sides in ways]
            # At equal counts the shorter left part.
            self._found[part] = min(counts) if counts else self._most.two_runs(*part)
            todo.pop()
        return self._found[steps, level]

    def _ways(self, steps: int, level: int) -> list[tuple[int, tuple[int, int], tuple[int, int]]]:
        """Ways to split a part, as (ahead, right part, left part); none where the answer is known."""
        passes = self._most.passes(steps, level)
        assert passes is not None, "a part was made that cannot be done"
        if passes <= 2:
            return []
        # Outside of these bounds one of the parts would need more runs per step than the whole does.
        low = max(1, steps - self._most.steps(passes, level + 1))
        high = min(self._most.steps(passes - 1, level), steps - 1)
        few = steps > SHORT
        ahead = self._few(steps, level, passes, low, high) if few else range(low, high + 1)
        return [(y, (steps - y, level + 1), (y, level)) for y in ahead]

    def _few(self, steps: int, level: int, passes: int, low: int, high: int) -> list[int]:
        """A few ways to split a long part: those that were best most often where all were tried."""
        left = self._most.steps(passes - 2, level)
        right = steps - self._most.steps(passes - 1, level + 1)
        if len(self._found) > MANY:
            return [left if low <= left <= high else high]
        return sorted({high, *(y for y in (left, right) if low <= y < high)})


class _Capacity:
    """N(j, r): how many steps can be done from each level, if each runs at most r times."""

    def __init__(self, leaves: tuple[int, ...]) -> None:
        self.leaves = leaves
        self.ends = [0, *accumulate(leaves)]
        self.rows = [[0] * len(leaves), list(leaves)]

    def steps(self, passes: int, level: int) -> int:
        while passes >= len(self.rows):
            row = list(self.leaves)
            for j in range(len(row) - 2, -1, -1):
                row[j] = self.rows[-1][j] + row[j + 1]
            self.rows.append(row)
        return self.rows[passes][level]

    def passes(self, steps: int, level: int) -> int | None:
        """The least r with N(level, r) ≥ steps; None where there is none."""
        if not steps:
            return 1
        if level >= len(self.leaves) or (level == len(self.leaves) - 1 and steps > self.leaves[level]):
            return None
        low, high = 0, 1
        while self.steps(high, level) < steps:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.steps(middle, level) < steps else (low, middle)
        return high

    def two_runs(self, steps: int, level: int) -> tuple[int, int]:
        """The best that at most two runs per step can do, and the first split of it."""
        if steps <= self.leaves[level]:
            return steps, steps
        deepest = bisect_left(self.ends, self.ends[level] + steps) - 1
        last = self.leaves[deepest]
        unused = self.ends[deepest + 1] - self.ends[level] - steps
        first = max(self.leaves[level] - unused, 1)
        return 2 * steps - last, first
