"""The one simulator: it accepts or refuses a schedule, and says what the schedule does.

No schedule runs, is reported or is compared before it was accepted here. The rules:

- given values (parameters, buffers, inputs, accumulated gradients) are there from the start, tangents from
  the start of the backward; given and held values, outputs and gradients are never dropped;
- an op runs when everything it reads is there; while it runs, all that it writes and its workspace are
  there as well, also when a written value is there already: the copy is freed when the op ends;
- where a drop among those right behind a run, in the same list, is of a value that the op takes, what the op
  writes is put in that value's place: the value counts no more from the run on;
- a forward list runs forward ops only; the backward list may run both;
- a pinned op runs exactly once; a random op that runs more than once holds its saved random state from
  its first run to its last;
- at the end of the forward every output is there, at the end of the backward every gradient.

One pass over the steps, O(steps + reads + writes).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from math import fsum
from typing import Any

from ..errors import FormatError, ScheduleError
from ..units import format_bytes, format_seconds
from . import json_format
from .graph import GIVEN_KINDS, Graph, Op
from .schedule import Drop, Run, Schedule

__all__ = ["Timeline", "in_place", "saved_bytes", "simulate"]

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
                raise FormatError(f"resident[{index}]: expected a whole number, found {size!r}")
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
    machine = _Machine(graph, schedule)
    for step in schedule.forward:
        machine.take(step)
    machine.end_forward()
    for step in schedule.backward:
        machine.take(step)
    return machine.end_backward()


def saved_bytes(graph: Graph, schedule: Schedule) -> int:
    """The bytes that a schedule holds between forward and backward, besides what was there before."""
    machine = _Machine(graph, schedule)
    before = machine.bytes
    for step in schedule.forward:
        machine.take(step)
    return machine.bytes - before


def in_place(graph: Graph, schedule: Schedule) -> dict[int, str]:
    """By step, the value in whose place a run puts what it writes: the first of `takes` dropped behind it."""
    taken: dict[int, str] = {}
    if not any(op.takes for op in graph.ops):
        return taken
    for steps, start in ((schedule.forward, 0), (schedule.backward, len(schedule.forward))):
        run, takes = start, frozenset[str]()
        for index, step in enumerate(steps, start):
            if isinstance(step, Run):
                run, takes = index, frozenset(graph.op[step.op].takes if step.op in graph.op else ())
            elif step.value in takes:
                taken.setdefault(run, step.value)
    return taken


class _Machine:
    """The state of the device while a schedule is replayed."""

    def __init__(self, graph: Graph, schedule: Schedule) -> None:
        self.graph = graph
        self.size = {value.name: value.bytes for value in graph.values}
        self.there = {value.name for value in graph.values if value.kind in GIVEN_KINDS}
        self.bytes = graph.fixed_bytes + sum(self.size[name] for name in self.there)
        self.resident: list[int] = []
        self.in_place = in_place(graph, schedule)
        self.taken: str | None = None
        self.runs: Counter[str] = Counter()
        self.runs_left = Counter(step.op for step in schedule.steps if isinstance(step, Run))
        self.in_backward = False
        self.boundary = len(schedule.forward)
        self.boundary_bytes = 0

    def take(self, step: Run | Drop) -> None:
        if isinstance(step, Run):
            self.run(self.find_op(step.op))
        else:
            self.drop(step.value)

    def run(self, op: Op) -> None:
        self.check_run(op)
        self.runs[op.name] += 1
        self.runs_left[op.name] -= 1
        first, last = self.runs[op.name] == 1, self.runs_left[op.name] == 0
        if first and not last:
            self.bytes += op.state
        self.taken = self.in_place.get(len(self.resident))
        if self.taken is not None:
            self.bytes -= self.size[self.taken]
        fresh = [name for name in op.writes if name not in self.there]
        written = sum(self.size[name] for name in op.writes)
        self.resident.append(self.bytes + written + op.workspace)
        self.there.update(fresh)
        self.bytes += sum(self.size[name] for name in fresh)
        if last and not first:
            self.bytes -= op.state

    def drop(self, name: str) -> None:
        if name not in self.size:
            self.refuse(f"drops {name!r}, which is not a value of the graph")
        if name not in self.there:
            self.refuse(f"drops {name!r}, which is not there")
        if not self.graph.value[name].droppable:
            self.refuse(f"drops {name!r}, but the caller holds it ({self.graph.value[name].kind})")
        self.there.remove(name)
        if name != self.taken:
            self.bytes -= self.size[name]
        self.resident.append(self.bytes)

    def check_run(self, op: Op) -> None:
        if op.phase == "backward" and not self.in_backward:
            self.refuse(f"runs {op.name!r} in the forward, but it depends on a tangent")
        if op.kind == "pinned" and self.runs[op.name]:
            self.refuse(f"runs {op.name!r} again, but it may run only once")
        for name in op.reads:
            if name not in self.there:
                self.refuse(f"runs {op.name!r}, which reads {name!r}, but that is not there")

    def find_op(self, name: str) -> Op:
        op = self.graph.op.get(name)
        if op is None:
            self.refuse(f"runs {name!r}, which is not an op of the graph")
        return op  # type: ignore[return-value]  # refuse always raises

    def end_forward(self) -> None:
        self.need("output", "at the end of the forward")
        tangents = [value for value in self.graph.values if value.kind == "tangent"]
        self.there.update(value.name for value in tangents)
        self.boundary_bytes = self.bytes + self.graph.boundary
        self.bytes += sum(value.bytes for value in tangents)
        self.in_backward = True

    def end_backward(self) -> Timeline:
        self.need("gradient", "at the end of the backward")
        for op in self.graph.ops:
            if op.kind == "pinned" and not self.runs[op.name]:
                self.refuse(f"the schedule ends, but {op.name!r}, which must run once, never ran")
        peak = max(self.resident, default=self.bytes)
        peak_step = self.resident.index(peak) if self.resident else 0
        for size in (self.boundary_bytes, self.bytes_at_backward_start()):
            if size > peak:
                peak, peak_step = size, max(self.boundary - 1, 0)
        ops = self.graph.ops  # summed in their order and not in that of the runs, which may not matter
        return Timeline(
            resident=tuple(self.resident),
            boundary=self.boundary,
            peak=peak,
            peak_step=peak_step,
            seconds=fsum(op.seconds * self.runs[op.name] for op in ops),
            again=fsum(op.seconds * (self.runs[op.name] - 1) for op in ops if self.runs[op.name]),
        )

    def bytes_at_backward_start(self) -> int:
        tangents = sum(value.bytes for value in self.graph.values if value.kind == "tangent")
        return self.boundary_bytes + tangents

    def need(self, kind: str, when: str) -> None:
        for value in self.graph.values:
            if value.kind == kind and value.name not in self.there:
                self.refuse(f"{when} the {kind} {value.name!r} is not there")

    def refuse(self, reason: str) -> None:
        index = len(self.resident)
        part = "forward" if index < self.boundary else "backward"
        raise ScheduleError(f"step {index} ({part}): {reason}", step=index)
