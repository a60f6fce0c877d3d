"""Who is on the device from when to when: a schedule replayed into stays.

A stay is an interval of steps during which some bytes are resident under one name: a value between the
step that writes it and the one that drops it or writes in its place, a fixed band, an op's workspace. The
bytes of the stays that cover a step add up to `timeline.resident` there, and those that cross the boundary
(with what the caller holds there) to the simulator's bytes between forward and backward.
O(steps + reads + writes).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from ..plans.graph import GIVEN_KINDS, Graph, Op
from ..plans.schedule import Run, Schedule
from ..plans.simulator import in_place

__all__ = ["Stay", "stays"]

VALUE = "value"


@dataclass(frozen=True, slots=True)
class Stay:
    """Bytes that are resident from step `start` up to, not including, step `end`.

    `what` is "value", "fixed", "workspace", "copy" (an op run again writes beside a value that is still
    there), "random state" or "caller"; `crosses` says that it is there between forward and backward,
    `again` that a repeated run wrote it.
    """

    name: str
    bytes: int
    start: int
    end: int
    what: str = VALUE
    crosses: bool = False
    again: bool = False


def stays(graph: Graph, schedule: Schedule) -> list[Stay]:
    """All stays of a schedule that the simulator has accepted."""
    replay = _Replay(graph, schedule)
    for index, step in enumerate(schedule.steps):
        if index == replay.boundary:
            replay.cross()
        if isinstance(step, Run):
            replay.run(index, graph.op[step.op])
        elif step.value in replay.open:  # else a run has written in its place
            replay.close(step.value, index)
    return replay.finish()


class _Replay:
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
        self.in_backward = False
        for value in graph.values:
            if value.kind in GIVEN_KINDS:
                self.begin(value.name, 0)

    def begin(self, name: str, index: int, *, again: bool = False, crosses: bool = False) -> None:
        size = self.graph.value[name].bytes
        self.open[name] = Stay(name, size, index, self.length, again=again, crosses=crosses)

    def close(self, name: str, index: int) -> None:
        stay = self.open.pop(name)
        self.done.append(Stay(name, stay.bytes, stay.start, index, VALUE, stay.crosses, stay.again))

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
        self.in_backward = True
        for there in (self.open, self.states):
            there.update({name: replace(stay, crosses=True) for name, stay in there.items()})
        for value in self.graph.values:
            if value.kind == "tangent":
                self.begin(value.name, self.boundary, crosses=True)

    def finish(self) -> list[Stay]:
        if not self.in_backward:
            self.cross()
        return self.done + list(self.open.values())
