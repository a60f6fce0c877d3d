"""The moves of the greedy descent: ways to close a gap, and what each of them would do.

Problem: a value waits between two neighbouring events while there is too much on the device. Dropping it
there means to recompute it right before the second event, and what that op reads may be gone by then.

Method: three policies for inputs that are gone (keep them until there, keep them only where that fits the
budget, recompute them in turn) give up to three lists of ops to run. Where a later run recomputes one of
those inputs anyway, it may be taken away: the input is kept from here on instead. Each way is tried on the
tape, measured by the excess that it removes, and taken back.

Complexity: O(runs of the move) edits of the tape per way, twice.

Limits: moves of more than `reach` runs are not looked at.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .tape import Tape

__all__ = ["Move", "Moves"]

KEEP, MIXED, RECOMPUTE = "keep", "mixed", "recompute"
POLICIES = (KEEP, MIXED, RECOMPUTE)


@dataclass
class Move:
    """A way to close a gap.

    It costs `seconds`, removes `gain` of the excess, runs the ops `runs` right before the gap's end, and
    takes away the runs at the slots `later`, which are superfluous then.
    """

    seconds: float
    gain: float
    runs: Sequence[int] = ()
    later: Sequence[int] = ()

    def score(self, exponent: float) -> float:
        """Less is better; a move that costs nothing is ranked by what it gains."""
        # A move may even save time, when it makes a later run superfluous: such moves come first.
        if self.seconds <= 0:
            return -self.gain
        return float(self.seconds / self.gain**exponent)


class Moves:
    """The moves on a tape under a budget; `added` is where the last move that was applied put its runs."""

    def __init__(self, tape: Tape, budget: int, exponent: float, reach: int) -> None:
        self.tape, self.budget, self.exponent, self.reach = tape, budget, exponent, reach
        self.facts = tape.facts
        self.added: list[int] = []
        self.removed: list[tuple[int, int]] = []

    def excess(self, low: int = 0, high: int | None = None) -> int:
        """The bytes above the budget, summed over the runs between two slots."""
        return int(np.maximum(self.tape.mem[low:high] - self.budget, 0).sum())

    def ways(self, value: int, after: int) -> list[list[int]]:
        """The lists of ops that would close a gap; none when it is closed already."""
        tape = self.tape
        if tape.at[after] < 0 or value not in self.facts.reads[tape.at[after]]:
            return []
        before, _ = tape.around(value, after)
        if tape.mem[tape.waits_from(value, before) : after].max(initial=0) <= self.budget:
            return []
        ways: list[list[int]] = []
        for policy in POLICIES:
            runs = self.collect(value, after, policy)
            # The three policies often agree; each distinct list is tried once.
            if runs and runs not in ways:
                ways.append(runs)
        return ways

    def best(self, ways: list[list[int]], after: int) -> Move | None:
        """The best of several ways to close a gap, or None when none helps."""
        best: Move | None = None
        for runs in ways:
            later = self.later(runs, after)
            # Taking a later run away saves its seconds but keeps its value for longer: which is better is
            # measured.
            for hoist in (True, False) if later else (False,):
                move = self.measure(runs, later if hoist else [], after)
                if move.gain > 0 and (best is None or move.score(self.exponent) < best.score(self.exponent)):
                    best = move
        return best

    def collect(self, value: int, after: int, policy: str) -> list[int]:
        """The ops that a move runs before `after`, in order; none when they are more than `reach`."""
        facts = self.facts
        if not self.tape.may_run(facts.writer[value], after):
            return []
        runs: list[int] = []
        seen: set[int] = set()
        # Depth first, each op twice on the stack: once to visit its inputs, once (ready) to be run after
        # them.
        todo = [(facts.writer[value], False)]
        while todo:
            op, ready = todo.pop()
            if ready:
                runs.append(op)
                continue
            if op in seen:
                continue
            seen.add(op)
            if len(seen) > self.reach:
                return []
            todo.append((op, True))
            if policy is not KEEP:
                for other in facts.reads[op]:
                    if facts.writer[other] not in seen and self.fetches(other, after, policy):
                        todo.append((facts.writer[other], False))
        return runs

    def fetches(self, value: int, after: int, policy: str) -> bool:
        """Whether an input has to be recomputed, rather than wait until there."""
        tape = self.tape
        before, there = tape.around(value, after)
        if there or not tape.may_run(self.facts.writer[value], after):
            return False
        if policy is RECOMPUTE:
            return True
        top = tape.mem[tape.waits_from(value, before) : after].max(initial=0)
        return int(top) + self.facts.size[value] > self.budget

    def later(self, runs: list[int], after: int) -> list[int]:
        """Later runs that are not needed when what the move recomputes is kept until there."""
        tape, slots = self.tape, []
        for op in runs[:-1]:
            index = bisect_left(tape.runs[op], after)
            if index < len(tape.runs[op]):
                slots.append(tape.runs[op][index])
        return slots

    def measure(self, runs: list[int], later: list[int], after: int) -> Move:
        """Apply a move, see what it does, and take it back."""
        tape, seconds = self.tape, self.facts.seconds
        cost = sum(seconds[op] for op in runs) - sum(seconds[tape.at[slot]] for slot in later)
        self.apply(runs, later, after)
        low, high = tape.low, tape.high + 1
        new = self.excess(low, high)
        self.undo()
        return Move(cost, self.excess(low, high) - new, runs, later)

    def apply(self, runs: Sequence[int], later: Sequence[int], after: int) -> None:
        """Edit the tape: run ops right before `after`, and take later runs away."""
        tape = self.tape
        tape.low, tape.high = len(tape.at), 0
        self.added = tape.free_slots(after, len(runs))
        self.removed = [(tape.at[slot], slot) for slot in later]
        for op, slot in zip(runs, self.added, strict=True):
            tape.insert(op, slot)
        for slot in later:
            tape.remove(slot)

    def undo(self) -> None:
        """Take the last move back."""
        for op, slot in reversed(self.removed):
            self.tape.insert(op, slot)
        for slot in reversed(self.added):
            self.tape.remove(slot)
