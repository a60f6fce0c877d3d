"""Peak-aware greedy recomputation: the descent and the clean-up that `auto` is made of.

Problem: bring the resident bytes of every run of a tape under a budget, for little extra time.

Method: let the *excess* be the sum over runs of the bytes above the budget: an area, because it sees progress
that the maximum hides. A *gap* is a stretch between two neighbouring events of a value over which it is only
waiting; the first event belongs to it where its run could write in the value's place. A move closes a gap:
the value is dropped after the first event and recomputed right before the second; what that op reads and is
gone by then is kept or recomputed in turn (see `moves`). Moves are taken by least extra seconds per (excess
removed)^exponent until the excess is zero. (DTR, Kirisame et al. 2021, evicts by seconds per byte and
staleness while a step runs; here the whole step is known, so a gain is counted where it matters.) Then
repeated runs that the budget does not need are taken away, dearest first.

The next move comes from a heap that starts with optimistic scores (the value's whole gap gains, and what the
op's other outputs wait over, which come back with it; only its own op costs) and evaluates a move only when
it comes up: applied to the tape, measured, taken back. Gains mostly shrink as the excess does, so few moves
are evaluated more than once or twice.

Complexity: O(moves · evaluations per move · slots in numpy); some 10^2 μs per evaluation.

Limits: a local search without a bound. It stalls where no move of at most `reach` runs helps.
"""

from __future__ import annotations

import heapq
from itertools import pairwise
from math import inf

import numpy as np
import numpy.typing as npt

from ...plans.patience import check_time
from .moves import Move, Moves
from .tape import Tape

__all__ = ["PlainTape", "descend", "prune"]

LEAST_PROGRESS = 0.95
"""A descent gives up when going through all gaps leaves more than this share of the excess. Chosen: no plan
moves with 0.9 or 0.98 (this and all of the search's constants: benchmarks/constants.py)."""

REACH, LONGEST = 8, 32
"""How many runs a move may add, at first and once shorter moves no longer help; the second is the first times
a power of four. Chosen: with 2 at first plans are up to 6 % slower and the smallest peak up to 4 % larger;
with 8 at last up to 2 % and 3 %. With 32 at first, or 128 at last, one plan in 28 is 2 % faster."""


class Descent:
    """One greedy run over a tape towards a budget."""

    def __init__(self, tape: Tape, budget: int, exponent: float, tolerance: float, limit: int | None) -> None:
        self.tape, self.facts, self.budget = tape, tape.facts, budget
        self.exponent, self.tolerance = exponent, tolerance
        self.limit = inf if limit is None else tape.edits + limit
        self.moves = Moves(tape, budget, exponent, REACH)
        self.heap: list[tuple[float, int, int]] = []

    def run(self) -> bool:
        """Take moves until the budget holds (True) or none helps (False)."""
        tape, excess = self.tape, self.moves.excess()
        while excess:
            self.fill()
            self.drain()
            before, excess = excess, self.moves.excess()
            if excess > LEAST_PROGRESS * before or tape.edits >= self.limit:
                if self.moves.reach >= LONGEST or tape.edits >= self.limit:
                    return False
                # Longer moves are tried only now, since trying them costs most.
                self.moves.reach *= 4
        return True

    def fill(self) -> None:
        """Put every gap that covers a run above the budget on the heap, with an optimistic score."""
        tape, facts = self.tape, self.facts
        over = np.maximum(tape.mem - self.budget, 0)
        # Prefix sums: the excess under any gap, and how many runs of it are too high, in O(1) each.
        area = np.concatenate(([0], np.cumsum(over))).tolist()
        count = np.concatenate(([0], np.cumsum(over > 0))).tolist()
        self.heap = []
        for value, events in enumerate(tape.events):
            writer = facts.writer[value]
            if not facts.recomputable[writer] or not facts.size[value]:
                continue
            for before, after in pairwise(events):
                start = tape.waits_from(value, before)
                hot = count[after] - count[start]
                # A gap that ends with the writer's own run is closed already: the value is written anew
                # there.
                if hot and tape.at[after] != writer:
                    # Optimistic on both sides, so that no good move is missed: a run may be above by less
                    # than the size, and the op's inputs may be gone. What is real is measured when the move
                    # comes up.
                    waiting = self.waiting(writer, after)
                    size = sum(facts.size[other] * (count[after] - count[since]) for other, since in waiting)
                    gain = min(size, area[after] - area[min(since for _, since in waiting)])
                    self.push(value, after, Move(facts.seconds[writer], gain))

    def waiting(self, op: int, after: int) -> list[tuple[int, int]]:
        """The outputs of an op that wait for a run at a slot or after it, each with where that begins.

        One more run gives back all of them, so all of them may be dropped.
        """
        tape, found = self.tape, []
        for value in self.facts.writes[op]:
            before, there = tape.around(value, after)
            if there:
                found.append((value, tape.waits_from(value, before)))
        return found

    def push(self, value: int, after: int, move: Move) -> None:
        heapq.heappush(self.heap, (move.score(self.exponent), value, after))

    def drain(self) -> None:
        """Take moves until the heap is empty or the budget holds."""
        while self.heap and self.tape.edits < self.limit:
            check_time()
            _, value, after = heapq.heappop(self.heap)
            ways = self.moves.ways(value, after)
            after = self.make_slots(after, max(map(len, ways), default=0))
            move = self.moves.best(ways, after)
            if move is None:
                continue
            best = self.heap[0][0] if self.heap else inf
            # The score was out of date: back it goes with the true one. The tolerance keeps near-ties from
            # being evaluated over and over.
            if move.score(self.exponent) > best + self.tolerance * abs(best):
                self.push(value, after, move)
                continue
            self.commit(move, after)
            # Cheaper than summing the excess, and enough to stop.
            if self.tape.mem.max() <= self.budget:
                return

    def make_slots(self, after: int, count: int) -> int:
        """See to it that there are free slots before a run; returns where that run is then."""
        tape = self.tape
        if not count or tape.free_slots(after, count):
            return after
        # Twice what is needed, since moves gather at the same places; else the next one would widen anew.
        slots = 2 * count + 4
        tape.widen(after, slots)
        # Slots keep their order, and so does the heap.
        self.heap = [
            (score, value, slot + slots if slot >= after else slot) for score, value, slot in self.heap
        ]
        return after + slots

    def commit(self, move: Move, after: int) -> None:
        """Apply a move for good, and put the gaps it made on the heap."""
        tape, facts = self.tape, self.facts
        self.moves.apply(move.runs, move.later, after)
        seen = set()
        for slot in self.moves.added:
            op = tape.at[slot]
            for other in facts.reads[op] + facts.writes[op]:
                if other not in seen and facts.recomputable[facts.writer[other]]:
                    seen.add(other)
                    self.push_new(other, slot)

    def push_new(self, value: int, slot: int) -> None:
        """Put the gaps of a value around a new run on the heap."""
        tape, facts = self.tape, self.facts
        events = tape.events[value]
        index = events.index(slot)
        # The gaps on both sides of the new run, and their neighbours, whose bytes it has changed.
        for after in events[max(index - 1, 1) : index + 3]:
            if tape.at[after] == facts.writer[value]:
                continue
            gain = 0.0
            for other, since in self.waiting(facts.writer[value], after):
                over = np.maximum(tape.mem[since:after] - self.budget, 0)
                gain += float(np.minimum(over, facts.size[other]).sum())
            if gain > 0:
                self.push(value, after, Move(facts.seconds[facts.writer[value]], gain))


def descend(
    tape: Tape, budget: int, *, exponent: float = 1.0, tolerance: float = 0.1, limit: int | None = None
) -> bool:
    """Add repeated runs until nothing is above the budget; whether that was reached.

    A move is taken when its score is within `tolerance` of the best known one, which may be out of date.
    After `limit` edits of the tape it gives up.
    """
    return Descent(tape, budget, exponent, tolerance, limit).run()


def prune(tape: Tape, budget: int, *, limit: int | None = None) -> None:
    """Take away repeated runs that the budget does not need, dearest first; stop after `limit` edits."""
    seconds = tape.facts.seconds
    last = inf if limit is None else tape.edits + limit
    while True:
        again = [slot for op, slots in enumerate(tape.runs) for slot in slots[0 if tape.vain(op) else 1 :]]
        again.sort(key=lambda slot: (-seconds[tape.at[slot]], -slot))
        removed = 0
        for slot in again:
            if tape.edits >= last:
                break
            op = tape.at[slot]
            if tape.runs[op][0] == slot and not tape.vain(op):
                continue
            # Only the slots that the removal touches can have risen above the budget.
            tape.low, tape.high = len(tape.at), 0
            tape.remove(slot)
            if tape.mem[tape.low : tape.high + 1].max() > budget:
                tape.insert(op, slot)
            else:
                removed += 1
        # One removal may make another possible (its inputs are needed for less long), so go on until none is.
        if not removed:
            return


class PlainTape(Tape):
    """A tape that descends and prunes itself: what `native.NativeTape` does, without a compiler."""

    def in_order(self) -> npt.NDArray[np.int32]:
        """The runs in order, as an array."""
        return np.array(self.order(), dtype=np.int32)

    def copy(self) -> PlainTape:
        """The same tape once more."""
        return PlainTape(self.facts, self.order())

    def descend(
        self, budget: int, *, exponent: float = 1.0, tolerance: float = 0.1, limit: int | None = None
    ) -> bool:
        """See `descend`."""
        return descend(self, budget, exponent=exponent, tolerance=tolerance, limit=limit)

    def prune(self, budget: int, *, limit: int | None = None) -> None:
        """See `prune`."""
        prune(self, budget, limit=limit)
