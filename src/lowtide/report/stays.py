"""Who is on the device from when to when: the stream of a schedule's events folded into stays.

A stay is an interval of steps during which some bytes are resident under one name: a value between the
step that writes it and the one that drops it or writes in its place, a fixed band, an op's workspace. The
bytes of the stays that cover a step add up to `timeline.resident` there, and those that cross the boundary
(with what the caller holds there) to the simulator's bytes between forward and backward.
O(steps + reads + writes).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..plans.events import COPY, GIVEN, VALUE, Allocate, Boundary, Event, Free, events
from ..plans.graph import Graph
from ..plans.schedule import Schedule

__all__ = ["VALUE", "Stay", "stays"]


@dataclass(frozen=True, slots=True)
class Stay:
    """Bytes that are resident from step `start` up to, not including, step `end`.

    `what` is "value", "fixed", "workspace", "copy" (a recomputed op writes beside a value that is still
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
    """All stays of a schedule, in the order in which they begin."""
    book = _Book(graph, len(schedule.steps))
    for event in events(graph, schedule):
        book.enter(event)
    return book.stays


class _Book:
    """Stays as they begin and end; one that has not ended lasts to the end of the step."""

    def __init__(self, graph: Graph, length: int) -> None:
        self.graph = graph
        self.length = length
        self.stays: list[Stay] = []
        self.open: dict[tuple[str, str], int] = {}
        self.written: set[str] = set()

    def enter(self, event: Event) -> None:
        if isinstance(event, Allocate):
            if event.in_place_of is not None:
                self.end(VALUE, event.in_place_of, event.step)
            self.begin(event)
        elif isinstance(event, Free):
            # What is freed at the end of a run is there while it runs; a dropped value is gone.
            self.end(event.what, event.name, event.step if event.what == VALUE else event.step + 1)
        elif isinstance(event, Boundary):
            for place in self.open.values():
                self.stays[place] = replace(self.stays[place], crosses=True)
        elif event.workspace:
            self.stays.append(Stay(event.op, event.workspace, event.step, event.step + 1, "workspace"))

    def begin(self, event: Allocate) -> None:
        name = event.name
        what = VALUE if event.what == GIVEN else event.what
        size = self.graph.value[name].bytes if event.in_place_of is not None else event.bytes
        again = event.what in (VALUE, COPY) and name in self.written
        if event.what == VALUE:
            self.written.add(name)
        self.open[what, name] = len(self.stays)
        self.stays.append(Stay(name, size, event.step, self.length, what, again=again))

    def end(self, what: str, name: str, step: int) -> None:
        place = self.open.pop((what, name), None)
        if place is not None:  # else something was written in the value's place before it was dropped
            self.stays[place] = replace(self.stays[place], end=step)
