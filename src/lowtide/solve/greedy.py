"""Peak-aware greedy recomputation: the descent and the clean-up that `auto` is made of.

Problem: bring the resident bytes of every run of a tape under a budget, for little extra time.

Method: let the *excess* be the sum over runs of the bytes above the budget: an area, because it sees
progress that the maximum hides. A *gap* is a stretch between two neighbouring events of a value over which
it is only waiting. A move closes a gap: the value is dropped after the first event and its op runs again
right before the second; what that op reads and is gone by then is kept until there or recomputed in turn.
Moves are taken by least extra seconds per (excess removed)^exponent until the excess is zero. Then repeated
runs that the budget does not need are taken away, dearest first.

The next move comes from a heap that starts with optimistic scores (the value's whole gap gains, only its
own op costs) and evaluates a move only when it comes up: applied to the tape, measured, taken back. Gains
mostly shrink as the excess does, so few moves are evaluated more than once or twice.

Complexity: O(moves · evaluations per move · slots in numpy); some 10^2 μs per evaluation.

Limits: a local search without a bound. It stalls where no move of at most `reach` runs helps.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf

import numpy as np

from .tape import Tape

__all__ = ["descend", "prune"]

KEEP, MIXED, AGAIN = "keep", "mixed", "again"
"""What a move does with inputs that are gone: keep them until there, keep only where that fits the budget,
or recompute them."""

LEAST_PROGRESS = 0.95
"""A descent gives up when going through all gaps leaves more than this share of the excess."""

REACH, LONGEST = 8, 32
"""How many runs a move may add, at first and once shorter moves no longer help."""

TOLERANCE = 0.25
"""A move is taken when its score is this close to the best known one, which may be out of date."""

POLICIES = (KEEP, MIXED, AGAIN)


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
        if self.seconds <= 0:
            return -self.gain
        return float(self.seconds / self.gain**exponent)


class Descent:
    """One greedy run over a tape towards a budget."""

    def __init__(self, tape: Tape, budget: int, exponent: float, reach: int) -> None:
        self.tape, self.budget, self.exponent, self.reach = tape, budget, exponent, reach
        self.facts = tape.facts
        self.heap: list[tuple[float, int, int]] = []
        self.added: list[int] = []
        self.removed: list[tuple[int, int]] = []

    def run(self) -> bool:
        """Take moves until the budget holds (True) or none helps (False)."""
        excess = self.excess()
        while excess:
            self.fill()
            self.drain()
            before, excess = excess, self.excess()
            if excess > LEAST_PROGRESS * before:
                if self.reach >= LONGEST:
                    return False
                self.reach *= 4
        return True

    def excess(self) -> int:
        """The bytes above the budget, summed over all runs."""
        return int(np.maximum(self.tape.mem - self.budget, 0).sum())

    def fill(self) -> None:
        """Put every gap that covers a run above the budget on the heap, with an optimistic score."""
        tape, facts = self.tape, self.facts
        over = np.maximum(tape.mem - self.budget, 0)
        area = np.concatenate(([0], np.cumsum(over))).tolist()
        count = np.concatenate(([0], np.cumsum(over > 0))).tolist()
        self.heap = []
        for value, events in enumerate(tape.events):
            writer, size = facts.writer[value], facts.size[value]
            if not facts.again[writer] or not size:
                continue
            for before, after in pairwise(events):
                hot = count[after] - count[before + 1]
                if hot and tape.at[after] != writer:
                    gain = min(size * hot, area[after] - area[before + 1])
                    self.push(value, after, Move(facts.seconds[writer], gain))

    def push(self, value: int, after: int, move: Move) -> None:
        heapq.heappush(self.heap, (move.score(self.exponent), value, after))

    def drain(self) -> None:
        """Take moves until the heap is empty or the budget holds."""
        while self.heap:
            _, value, after = heapq.heappop(self.heap)
            ways = self.ways(value, after)
            after = self.make_room(after, max(map(len, ways), default=0))
            move = self.best(ways, after)
            if move is None:
                continue
            best = self.heap[0][0] if self.heap else inf
            if move.score(self.exponent) > best + TOLERANCE * abs(best):
                self.push(value, after, move)
                continue
            self.take(move, after)
            if self.tape.mem.max() <= self.budget:
                return

    def ways(self, value: int, after: int) -> list[list[int]]:
        """The lists of ops that would close a gap; none when it is closed already."""
        tape = self.tape
        if tape.at[after] < 0 or value not in self.facts.reads[tape.at[after]]:
            return []
        before, _ = tape.around(value, after)
        if tape.mem[before + 1 : after].max(initial=0) <= self.budget:
            return []
        ways: list[list[int]] = []
        for policy in POLICIES:
            runs = self.collect(value, after, policy)
            if runs and runs not in ways:
                ways.append(runs)
        return ways

    def make_room(self, after: int, count: int) -> int:
        """See to it that there are free slots before a run; returns where that run is then."""
        tape = self.tape
        if not count or tape.room(after, count):
            return after
        room = 2 * count + 4
        tape.widen(after, room)
        # Slots keep their order, and so does the heap.
        self.heap = [
            (score, value, slot + room if slot >= after else slot) for score, value, slot in self.heap
        ]
        return after + room

    def best(self, ways: list[list[int]], after: int) -> Move | None:
        """The best of several ways to close a gap, or None when none helps."""
        best: Move | None = None
        for runs in ways:
            later = self.later(runs, after)
            for hoist in (True, False) if later else (False,):
                move = self.measure(runs, later if hoist else [], after)
                if move.gain > 0 and (best is None or move.score(self.exponent) < best.score(self.exponent)):
                    best = move
        return best

    def collect(self, value: int, after: int, policy: str) -> list[int]:
        """The ops that a move runs before `after`, in order; none when they are more than `reach`."""
        facts = self.facts
        runs: list[int] = []
        seen: set[int] = set()
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
        if there or not self.facts.again[self.facts.writer[value]]:
            return False
        if policy is AGAIN:
            return True
        top = tape.mem[before + 1 : after].max(initial=0)
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
        new = int(np.maximum(tape.mem[low:high] - self.budget, 0).sum())
        self.undo()
        old = int(np.maximum(tape.mem[low:high] - self.budget, 0).sum())
        return Move(cost, old - new, runs, later)

    def apply(self, runs: Sequence[int], later: Sequence[int], after: int) -> None:
        tape = self.tape
        tape.low, tape.high = len(tape.at), 0
        self.added = tape.room(after, len(runs))
        self.removed = [(tape.at[slot], slot) for slot in later]
        for op, slot in zip(runs, self.added, strict=True):
            tape.insert(op, slot)
        for slot in later:
            tape.remove(slot)

    def undo(self) -> None:
        for op, slot in reversed(self.removed):
            self.tape.insert(op, slot)
        for slot in reversed(self.added):
            self.tape.remove(slot)

    def take(self, move: Move, after: int) -> None:
        """Apply a move for good, and put the gaps it made on the heap."""
        tape, facts = self.tape, self.facts
        self.apply(move.runs, move.later, after)
        seen = set()
        for slot in self.added:
            op = tape.at[slot]
            for other in facts.reads[op] + facts.writes[op]:
                if other not in seen and facts.again[facts.writer[other]]:
                    seen.add(other)
                    self.push_new(other, slot)

    def push_new(self, value: int, slot: int) -> None:
        """Put the gaps of a value around a new run on the heap."""
        tape, facts = self.tape, self.facts
        events = tape.events[value]
        index = events.index(slot)
        for at in range(max(index - 1, 1), min(index + 3, len(events))):
            before, after = events[at - 1], events[at]
            if tape.at[after] == facts.writer[value]:
                continue
            over = np.maximum(tape.mem[before + 1 : after] - self.budget, 0)
            gain = float(np.minimum(over, facts.size[value]).sum())
            if gain > 0:
                self.push(value, after, Move(facts.seconds[facts.writer[value]], gain))


def descend(tape: Tape, budget: int, *, exponent: float = 1.0, reach: int = REACH) -> bool:
    """Add repeated runs until nothing is above the budget; whether that was reached."""
    return Descent(tape, budget, exponent, reach).run()


def prune(tape: Tape, budget: int) -> None:
    """Take away repeated runs that the budget does not need, dearest first."""
    seconds = tape.facts.seconds
    while True:
        again = [slot for slots in tape.runs for slot in slots[1:]]
        again.sort(key=lambda slot: (-seconds[tape.at[slot]], -slot))
        removed = 0
        for slot in again:
            op = tape.at[slot]
            tape.low, tape.high = len(tape.at), 0
            tape.remove(slot)
            if tape.mem[tape.low : tape.high + 1].max() > budget:
                tape.insert(op, slot)
            else:
                removed += 1
        if not removed:
            return
