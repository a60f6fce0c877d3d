"""The order of runs that `auto` edits, with its resident bytes kept up to date.

Problem: a search over orders asks the same question thousands of times: what does the profile of resident
bytes look like with one more run here, or one fewer there?

Method: liveness makes the drops a function of the order, so a value's time in memory is read off its
sorted *events* (the runs that write or read it): between two neighbouring events it is there if and only if
the later one reads it. One more run touches only the intervals next to it, of the values it reads and
writes. Runs sit on sparse *slots* of a fixed array, so that nothing has to move to make space; empty slots
are sunk far below zero and never count. A run puts what it writes in the place of a value that it takes if
none of that value's later events finds it there; an edit changes this for its own slot and for the last
events before it of the values that it reads or writes.

Complexity: an edit takes O(log events + length of the changed intervals) per value, the latter in numpy.
When the space between two runs is used up, `widen` moves all that comes later in O(runs + reads + writes).

Limits: a first run stays where it is as long as anything reads it before the op's next run.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from ...plans.graph import Graph
from ...plans.order import updates_after_reads, with_drops
from ...plans.schedule import Schedule
from .precedence import precedence

if TYPE_CHECKING:
    from .native import NativeFacts

__all__ = ["Facts", "Tape"]

SUNK = 1 << 60
SPACING = 8


class Facts:
    """A graph by numbers: what a tape needs to know of each op and of each value that may be dropped.

    The moment between forward and backward is one more op, `boundary`, that writes the tangents. An op can
    wait for its second run if every reader of what it writes is among the events of a tape. `takes` are the
    values in whose place an op may write, `saves` is what that saves.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        # Numbers instead of names: the search asks millions of times, and C gets the same arrays.
        self.number = {op.name: index for index, op in enumerate(graph.ops)}
        self.boundary = len(graph.ops)
        self.returning = -1 if graph.returning is None else self.number[graph.returning.name]
        droppable = [value for value in graph.values if value.droppable]
        number = {value.name: index for index, value in enumerate(droppable)}
        self.size = [value.bytes for value in droppable]
        self.reads = [[number[name] for name in op.reads if name in number] for op in graph.ops] + [[]]
        tangents = [value for value in graph.values if value.kind == "tangent"]
        written = [list(op.writes) for op in graph.ops] + [[value.name for value in tangents]]
        self.writes = [[number[name] for name in names if name in number] for names in written]
        # What may not be dropped (outputs, gradients) is no value of the tape: it is added for good by its
        # writer's first run.
        self.held = [
            sum(graph.value[name].bytes for name in names if name not in number) for names in written
        ]
        self.writer = [self.boundary] * len(droppable)
        for op, values in enumerate(self.writes):
            for value in values:
                self.writer[value] = op
        self.takes = [[number[name] for name in op.takes] for op in graph.ops] + [[]]
        self.saves = [graph.value[op.takes[0]].bytes if op.takes else 0 for op in graph.ops] + [0]
        self.in_place = any(self.takes)
        self.seconds = [op.seconds for op in graph.ops] + [0.0]
        self.state = [op.state for op in graph.ops] + [0]
        self.recomputable = [op.kind != "pinned" for op in graph.ops] + [False]
        # The ops before which one has to run: they update what it reads, once, where they stand.
        updaters = (graph.updaters.get(op.name, ()) for op in graph.ops)
        self.until = [[self.number[name] for name in names] for names in updaters] + [[]]
        self.before = precedence(graph)
        self.after: list[list[int]] = [[] for _ in self.before]
        for op, others in enumerate(self.before):
            for other in others:
                self.after[other].append(op)
        read = {name for op in graph.ops for name in op.reads if name not in number}
        # A reader outside the tape's events would not be seen, so an op with one must run where it stands.
        self.can_wait = [op.kind == "pure" and read.isdisjoint(op.writes) for op in graph.ops] + [False]
        self.fixed = graph.fixed_bytes + graph.given_bytes
        workspace = [op.workspace for op in graph.ops] + [graph.boundary]
        self.own = [
            self.held[op] + bytes_ + sum(self.size[value] for value in self.reads[op] + self.writes[op])
            for op, bytes_ in enumerate(workspace)
        ]

    @cached_property
    def native(self) -> NativeFacts:
        """The same as arrays for the compiled search."""
        from .native import NativeFacts

        return NativeFacts(self)

    def order(self, forward: Iterable[str], backward: Iterable[str]) -> list[int]:
        """An order of runs by numbers, the boundary included."""
        forward, backward = updates_after_reads(self.graph, list(forward), list(backward))
        return [
            *(self.number[name] for name in forward),
            self.boundary,
            *(self.number[name] for name in backward),
        ]

    def schedule(self, order: Sequence[int]) -> Schedule:
        """The schedule of an order of runs."""
        split = order.index(self.boundary)
        names = [self.graph.ops[op].name if op != self.boundary else "" for op in order]
        return with_drops(self.graph, names[:split], names[split + 1 :])

    def floor(self, order: Sequence[int]) -> int:
        """What the largest single run needs with all else dropped: no plan in this order is below it."""
        held, floor = self.fixed, 0
        seen: set[int] = set()
        for op in order:
            floor = max(floor, held + self.own[op] - self.saves[op])
            held += 0 if op in seen else self.held[op]
            seen.add(op)
        return floor


class Tape:
    """An order of runs on slots, and the bytes resident while each one runs.

    `at[slot]` is the op that runs there, or -1, and `saved[slot]` what that run saves by writing in place;
    `events[value]` and `runs[op]` are sorted slots. `low` and `high` bound the slots that edits have changed
    since the caller last set them; `edits` counts them.
    """

    def __init__(self, facts: Facts, order: Sequence[int]) -> None:
        self.facts = facts
        self.seconds = 0.0
        self.edits = 0
        self._lay(order)

    def _lay(self, order: Sequence[int]) -> None:
        facts = self.facts
        length = SPACING * (len(order) + 1)
        self.at = [-1] * length
        self.saved = [0] * length
        self.events: list[list[int]] = [[] for _ in facts.size]
        self.runs: list[list[int]] = [[] for _ in facts.own]
        change = np.zeros(length + 1, dtype=np.int64)
        # Empty slots carry the bytes that cross them, sunk below zero: a maximum or an excess over a range of
        # slots then needs no mask, and a run put there only adds SUNK back.
        self.mem = np.full(length, facts.fixed - SUNK, dtype=np.int64)
        for index, op in enumerate(order):
            slot = SPACING * (index + 1)
            self.at[slot] = op
            self.mem[slot] += facts.own[op] + SUNK
            if not self.runs[op]:
                change[slot + 1] += facts.held[op]
            self.runs[op].append(slot)
            for value in facts.reads[op]:
                before = self.events[value][-1]
                change[before + 1] += facts.size[value]
                change[slot] -= facts.size[value]
                self.events[value].append(slot)
            for value in facts.writes[op]:
                self.events[value].append(slot)
        for op, slots in enumerate(self.runs):
            if len(slots) > 1 and facts.state[op]:
                change[slots[0]] += facts.state[op]
                change[slots[-1] + 1] -= facts.state[op]
        self.mem += np.cumsum(change[:-1])
        self.seconds = sum(facts.seconds[op] for op in order)
        self.low, self.high = length, 0
        if facts.in_place:
            for slot in range(SPACING, length, SPACING):
                self.saved[slot] = self._saves(slot)
                self.mem[slot] -= self.saved[slot]

    def order(self) -> list[int]:
        """The runs in order."""
        return [op for op in self.at if op >= 0]

    def widen(self, slot: int, more: int) -> None:
        """Put free slots before the run at `slot`: it and all later ones move back by that many."""
        facts, op = self.facts, self.at[slot]
        reads = sum(facts.size[value] for value in facts.reads[op])
        # What crosses the new empty slots: all that is there at the run, less what the run itself adds.
        across = self.mem[slot] + self.saved[slot] - facts.own[op] + reads
        if len(self.runs[op]) > 1 and self.runs[op][0] == slot:
            across -= facts.state[op]
        self.at[slot:slot] = [-1] * more
        self.saved[slot:slot] = [0] * more
        empty = np.full(more, across - SUNK, dtype=np.int64)
        self.mem = np.concatenate((self.mem[:slot], empty, self.mem[slot:]))
        for slots in chain(self.events, self.runs):
            if slots and slots[-1] >= slot:
                index = bisect_left(slots, slot)
                slots[index:] = [later + more for later in slots[index:]]

    def free_slots(self, slot: int, count: int) -> list[int]:
        """Free slots, evenly spread, right before the run at `slot`; none when there are not enough."""
        before = slot - 1
        while before > 0 and self.at[before] < 0:
            before -= 1
        # Evenly spread, so that later moves find free slots between these, too.
        if slot - before <= count:
            return []
        return [before + (slot - before) * (index + 1) // (count + 1) for index in range(count)]

    def peak(self) -> int:
        """The largest resident bytes of any run."""
        return int(self.mem.max())

    def around(self, value: int, slot: int) -> tuple[int, bool]:
        """The last event of a value before a slot, and whether the value is there on the way across it."""
        events = self.events[value]
        index = bisect_left(events, slot)
        there = index < len(events) and self.at[events[index]] != self.facts.writer[value]
        return events[index - 1], there

    def may_run(self, op: int, slot: int) -> bool:
        """Whether an op may run once more right before a slot: nothing has changed what it reads by then."""
        facts = self.facts
        return facts.recomputable[op] and all(self.runs[by][0] >= slot for by in facts.until[op])

    def waits_from(self, value: int, event: int) -> int:
        """The first slot that is relieved when a value is dropped right after one of its events.

        That event's own, if its op could write in the value's place then: the value has the bytes it saves.
        """
        return event if value in self.facts.takes[self.at[event]] else event + 1

    def insert(self, op: int, slot: int) -> None:
        """Run an op once more at a free slot."""
        self.edits += 1
        facts, mem, at = self.facts, self.mem, self.at
        # `own` counts every read as if it were there only for this run; what crosses the slot anyway is taken
        # off below.
        mem[slot] += SUNK + facts.own[op]
        low = slot
        for value in facts.reads[op]:
            events, size = self.events[value], facts.size[value]
            index = bisect_left(events, slot)
            if index < len(events) and at[events[index]] != facts.writer[value]:
                mem[slot] -= size
            else:
                before = events[index - 1] + 1
                mem[before:slot] += size
                low = min(low, before)
            events.insert(index, slot)
        for value in facts.writes[op]:
            events = self.events[value]
            index = bisect_left(events, slot)
            if index < len(events) and at[events[index]] != op:
                before = events[index - 1] + 1
                mem[before : slot + 1] -= facts.size[value]
                low = min(low, before)
            events.insert(index, slot)
        at[slot] = op
        self.seconds += facts.seconds[op]
        self._change_runs(op, slot, insort)
        self.low, self.high = min(self.low, low), max(self.high, slot)

    def remove(self, slot: int) -> None:
        """Take one of several runs away."""
        self.edits += 1
        facts, mem, at = self.facts, self.mem, self.at
        op = at[slot]
        mem[slot] -= SUNK + facts.own[op]
        low = slot
        for value in facts.reads[op]:
            events, size = self.events[value], facts.size[value]
            index = bisect_left(events, slot)
            del events[index]
            if index < len(events) and at[events[index]] != facts.writer[value]:
                mem[slot] += size
            else:
                before = events[index - 1] + 1
                mem[before:slot] -= size
                low = min(low, before)
        for value in facts.writes[op]:
            events = self.events[value]
            index = bisect_left(events, slot)
            del events[index]
            if index < len(events) and at[events[index]] != op:
                before = events[index - 1] + 1
                mem[before : slot + 1] += facts.size[value]
                low = min(low, before)
        at[slot] = -1
        self.seconds -= facts.seconds[op]
        self._change_runs(op, slot, list.remove)
        self.low, self.high = min(self.low, low), max(self.high, slot)

    def _change_runs(self, op: int, slot: int, change: Callable[[list[int], int], None]) -> None:
        """Put a slot among an op's runs, or take it out, with all that hangs on the first of them."""
        if self.facts.state[op]:
            self._hold_state(op, -1)
        first = self.runs[op][0]
        change(self.runs[op], slot)
        self._hold(op, first)
        if self.facts.state[op]:
            self._hold_state(op, 1)
        if self.facts.in_place:
            self._save_around(op, slot)

    def _save_around(self, op: int, slot: int) -> None:
        """An edit may have changed what is dropped after its slot, and after the last events before it."""
        self._save(slot)
        for value in self.facts.reads[op] + self.facts.writes[op]:
            index = bisect_left(self.events[value], slot)
            if index:
                self._save(self.events[value][index - 1])

    def _save(self, slot: int) -> None:
        """Take what a run saves by writing in place off its level."""
        saved = self._saves(slot)
        if saved != self.saved[slot]:
            self.mem[slot] += self.saved[slot] - saved
            self.saved[slot] = saved
            self.low, self.high = min(self.low, slot), max(self.high, slot)

    def _saves(self, slot: int) -> int:
        """What the run at a slot saves by writing in place."""
        op = self.at[slot]
        takes = self.facts.takes[op] if op >= 0 else ()
        return self.facts.saves[op] if any(self._dies(value, slot) for value in takes) else 0

    def _dies(self, value: int, slot: int) -> bool:
        """Whether a value is dropped after one of its events."""
        events = self.events[value]
        following = bisect_left(events, slot) + 1
        return following == len(events) or self.at[events[following]] == self.facts.writer[value]

    def _hold(self, op: int, was: int) -> None:
        """What an op holds for good is there from its first run on, which was elsewhere before an edit."""
        first, held = self.runs[op][0], self.facts.held[op]
        if not held or first == was:
            return
        if first > was:
            self.mem[was + 1 : first + 1] -= held
        else:
            self.mem[first + 1 : was + 1] += held
        self.low, self.high = min(self.low, first, was), max(self.high, first, was)

    def vain(self, op: int) -> bool:
        """Whether an op's first run is for nothing: the next, in the same phase, comes before any read."""
        facts, runs = self.facts, self.runs[op]
        if not facts.can_wait[op] or len(runs) < 2:
            return False
        (boundary,) = self.runs[facts.boundary]
        if (runs[0] < boundary) != (runs[1] < boundary):
            return False
        return all(self.events[value][1] == runs[1] for value in facts.writes[op])

    def _hold_state(self, op: int, sign: int) -> None:
        slots = self.runs[op]
        if len(slots) > 1:
            self.mem[slots[0] : slots[-1] + 1] += sign * self.facts.state[op]
            self.low, self.high = min(self.low, slots[0]), max(self.high, slots[-1])
