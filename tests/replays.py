"""Lifetimes and booked bytes from replays of their own: loops over the steps that know no stream of events.

They share nothing with `lowtide.plans.events` and check no rule: the schedule has to be an accepted one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from lowtide.devices.allocator import _Piece, _Pool
from lowtide.plans.graph import GIVEN_KINDS, Graph, Op
from lowtide.plans.schedule import Run, Schedule
from lowtide.report.stays import Stay

MIB = 1 << 20


def in_place(graph: Graph, schedule: Schedule) -> dict[int, str]:
    """By step, the value in whose place a run puts what it writes."""
    taken: dict[int, str] = {}
    for steps, start in ((schedule.forward, 0), (schedule.backward, len(schedule.forward))):
        run, takes = start, frozenset[str]()
        for index, step in enumerate(steps, start):
            if isinstance(step, Run):
                run, takes = index, frozenset(graph.op[step.op].takes)
            elif step.value in takes:
                taken.setdefault(run, step.value)
    return taken


def lifetimes(graph: Graph, schedule: Schedule) -> list[Stay]:
    """The stays of a schedule, in no order that matters."""
    replay = _Lifetimes(graph, schedule)
    for index, step in enumerate(schedule.steps):
        if index == replay.boundary:
            replay.cross()
        if isinstance(step, Run):
            replay.run(index, graph.op[step.op])
        elif step.value in replay.open:
            replay.close(step.value, index)
    if not schedule.backward:
        replay.cross()
    return replay.done + list(replay.open.values())


class _Lifetimes:
    def __init__(self, graph: Graph, schedule: Schedule) -> None:
        self.graph = graph
        self.boundary = len(schedule.forward)
        self.length = len(schedule.steps)
        self.in_place = in_place(graph, schedule)
        self.runs: Counter[str] = Counter()
        self.runs_left = Counter(step.op for step in schedule.steps if isinstance(step, Run))
        self.open: dict[str, Stay] = {}
        self.states: dict[str, Stay] = {}
        self.done = [
            Stay(name, size, 0, self.length, "fixed", crosses=True) for name, size in graph.fixed.items()
        ]
        for value in graph.values:
            if value.kind in GIVEN_KINDS:
                self.begin(value.name, 0)

    def begin(self, name: str, index: int, *, again: bool = False, crosses: bool = False) -> None:
        size = self.graph.value[name].bytes
        self.open[name] = Stay(name, size, index, self.length, again=again, crosses=crosses)

    def close(self, name: str, index: int) -> None:
        self.done.append(replace(self.open.pop(name), end=index))

    def run(self, index: int, op: Op) -> None:
        self.runs[op.name] += 1
        self.runs_left[op.name] -= 1
        first, last = self.runs[op.name] == 1, self.runs_left[op.name] == 0
        if op.state and first and not last:
            self.states[op.name] = Stay(op.name, op.state, index, self.length, "random state")
        if op.workspace:
            self.done.append(Stay(op.name, op.workspace, index, index + 1, "workspace"))
        if index in self.in_place:
            self.close(self.in_place[index], index)
        for name in op.writes:
            if name in self.open:
                size = self.graph.value[name].bytes
                self.done.append(Stay(name, size, index, index + 1, "copy", again=True))
            else:
                self.begin(name, index, again=not first)
        if op.state and last and not first:
            self.done.append(replace(self.states.pop(op.name), end=index + 1))

    def cross(self) -> None:
        for there in (self.open, self.states):
            there.update({name: replace(stay, crosses=True) for name, stay in there.items()})
        for value in self.graph.values:
            if value.kind == "tangent":
                self.begin(value.name, self.boundary, crosses=True)


def excess_of_two_steps(graph: Graph, schedule: Schedule, free: Iterable[int]) -> int:
    """What the CUDA allocator books above the plain sum of bytes in a step and in the one after it."""
    pool = _Pool(free)
    return max(_excess(graph, schedule, pool), _excess(graph, schedule, pool))


def _excess(graph: Graph, schedule: Schedule, pool: _Pool) -> int:
    step = _Booked(graph, pool)
    taken = in_place(graph, schedule)
    for index, action in enumerate(schedule.steps):
        if index == len(schedule.forward):
            step.plain += sum(value.bytes for value in graph.values if value.kind == "tangent")
        if isinstance(action, Run):
            step.run(graph.op[action.op], taken.get(index))
        else:
            step.drop(action.value)
    for piece in step.booked.values():
        pool.release(piece)
    return step.booked_peak - step.plain_peak


class _Booked:
    def __init__(self, graph: Graph, pool: _Pool) -> None:
        self.size = {value.name: value.bytes for value in graph.values}
        self.there = {value.name for value in graph.values if value.kind in GIVEN_KINDS}
        self.pool = pool
        self.booked: dict[str, _Piece] = {}
        self.taken: str | None = None
        self.plain = self.excess = self.plain_peak = self.booked_peak = 0

    def run(self, op: Op, taken: str | None) -> None:
        asked = op.writes if taken is None else ()
        requests = [*((name, self.size[name]) for name in asked), ("", op.workspace)]
        made = [(name, size, self.pool.allocate(size)) for name, size in requests if size > MIB]
        total = self.plain + sum(size for _, size in requests)
        over = self.excess + sum(piece.size - size for _, size, piece in made)
        self.plain_peak = max(self.plain_peak, total)
        self.booked_peak = max(self.booked_peak, total + over)
        for name, size, piece in reversed(made):
            if not name or name in self.there:
                self.pool.release(piece)
            else:
                self.booked[name] = piece
                self.excess += piece.size - size
        fresh = [name for name in op.writes if name not in self.there]
        self.plain += sum(self.size[name] for name in fresh)
        self.there.update(fresh)
        self.hand_over(taken, fresh)

    def hand_over(self, taken: str | None, fresh: list[str]) -> None:
        self.taken = taken
        if taken is not None:
            self.plain -= self.size[taken]
            if fresh and taken in self.booked:
                self.booked[fresh[0]] = self.booked.pop(taken)

    def drop(self, name: str) -> None:
        self.there.discard(name)
        if name != self.taken:
            self.plain -= self.size[name]
        if name in self.booked:
            piece = self.booked.pop(name)
            self.excess -= piece.size - self.size[name]
            self.pool.release(piece)
