"""The one simulator: it accepts or refuses a schedule, and says what the schedule does.

No schedule runs, is reported or is compared before it was accepted here. The rules, and the replay that keeps
to them, are in `events`; here its stream of events is added up. O(steps + reads + writes).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from math import fsum
from typing import Any

from ..arguments import kind_of
from ..errors import FormatError
from ..units import format_bytes, format_seconds
from . import json_format
from .events import FIXED, GIVEN, VALUE, Allocate, Boundary, Free, Ran, events
from .graph import Graph
from .schedule import Schedule

__all__ = ["Timeline", "saved_bytes", "simulate"]

FORMAT_VERSION = 1
FIELDS = ("boundary", "peak", "peak_step", "seconds", "again", "resident")


@dataclass(frozen=True)
class Timeline:
    """What a schedule does.

    `resident[i]` is the number of bytes while step i runs (its outputs and workspace included), or after it
    when it drops a value. `boundary` is the number of forward steps, `peak` the largest resident number or
    the one between forward and backward, `seconds` the time of all runs, `again` that of repeated runs.

    >>> import lowtide, torch
    >>> timeline = lowtide.plan(torch.nn.Linear(4, 4), torch.ones(2, 4)).timeline
    >>> timeline.peak, timeline.resident[timeline.peak_step], timeline.again
    (264, 264, 0.0)
    """

    resident: tuple[int, ...]
    boundary: int
    peak: int
    peak_step: int
    seconds: float
    again: float

    def __str__(self) -> str:
        share = self.again / (self.seconds - self.again) if self.seconds > self.again else 0.0
        return (
            f"Timeline: peak {format_bytes(self.peak)} at step {self.peak_step} of {len(self.resident)}, "
            f"{format_seconds(self.seconds)}, of which {format_seconds(self.again)} again (+{share:.1%})"
        )

    @cached_property
    def extra(self) -> float:
        """Seconds spent again, as a share of running everything once."""
        once = self.seconds - self.again
        return self.again / once if once > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """The plain form that JSON is written from."""
        return {
            "lowtide": "timeline",
            "version": FORMAT_VERSION,
            "boundary": self.boundary,
            "peak": self.peak,
            "peak_step": self.peak_step,
            "seconds": self.seconds,
            "again": self.again,
            "resident": list(self.resident),
        }

    @classmethod
    def from_dict(cls, data: Any) -> Timeline:
        """The timeline of a plain form; raises `FormatError` naming the field that is wrong."""
        json_format.check_header(data, "timeline", FORMAT_VERSION, FIELDS)
        resident = json_format.read_items(data, "resident")
        for index, size in enumerate(resident):
            if not isinstance(size, int) or isinstance(size, bool):
                raise FormatError(
                    f"resident[{index}]: expected a whole number, found {json_format.say(size)}"
                )
        return cls(
            resident=tuple(resident),
            boundary=json_format.read_count(data, "boundary"),
            peak=json_format.read_count(data, "peak"),
            peak_step=json_format.read_count(data, "peak_step"),
            seconds=json_format.read_number(data, "seconds"),
            again=json_format.read_number(data, "again"),
        )

    def to_json(self) -> str:
        """The timeline as JSON text."""
        return json_format.dump(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> Timeline:
        """The timeline of a JSON text."""
        return cls.from_dict(json_format.parse(text, "timeline"))


def simulate(graph: Graph, schedule: Schedule) -> Timeline:
    """Judge a schedule: its timeline, or `ScheduleError` naming the first bad step.

    >>> from lowtide import Graph, Op, Run, Schedule, Value, simulate
    >>> values = Value("x", 4, "input"), Value("w", 4, "parameter"), Value("y", 4, "output")
    >>> graph = Graph((Op("mul", ("x", "w"), ("y",), seconds=1.0),), values)
    >>> simulate(graph, Schedule((Run("mul"),), ())).peak
    12
    """
    kind_of("simulate", graph, Graph, "a Graph")
    kind_of("simulate", schedule, Schedule, "a Graph and a Schedule")
    now = between = 0
    resident: list[int] = []
    runs: list[str] = []
    for event in events(graph, schedule):
        if isinstance(event, Allocate):
            now += event.bytes
        elif isinstance(event, Ran):
            resident.append(now + event.workspace)
            runs.append(event.op)
        elif isinstance(event, Free):
            now -= event.bytes
            if event.what == VALUE:  # a step of its own; all else is freed at the end of a run
                resident.append(now)
        else:
            between = now + event.bytes
    return _timeline(graph, resident, len(schedule.forward), between, Counter(runs))


def _timeline(graph: Graph, resident: list[int], boundary: int, between: int, runs: Counter[str]) -> Timeline:
    peak = max(resident, default=between)
    peak_step = resident.index(peak) if resident else 0
    if between > peak:
        peak, peak_step = between, max(boundary - 1, 0)
    return Timeline(
        resident=tuple(resident),
        boundary=boundary,
        peak=peak,
        peak_step=peak_step,
        # Summed in the order of the ops and not in that of the runs, which may not matter.
        seconds=fsum(op.seconds * runs[op.name] for op in graph.ops),
        again=fsum(op.seconds * (runs[op.name] - 1) for op in graph.ops if runs[op.name]),
    )


def saved_bytes(graph: Graph, schedule: Schedule) -> int:
    """The bytes that a schedule holds between forward and backward, besides what was given to it."""
    saved = 0
    for event in events(graph, schedule):
        if isinstance(event, Boundary):
            break
        if isinstance(event, Allocate) and event.what not in (FIXED, GIVEN):
            saved += event.bytes
        elif isinstance(event, Free):
            saved -= event.bytes
    return saved
