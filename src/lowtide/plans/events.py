"""What a schedule does, as one stream of events: the simulator's replay, and its judgement.

Whoever wants to know what is on the device while a schedule runs folds this stream: `simulate` adds it up to
a timeline, the report makes lifetimes of it, the allocator's replay serves it with blocks. A schedule that
breaks a rule is refused at its first bad step, so what has been read to its end is accepted. The rules:

- given values (parameters, buffers, inputs, accumulated gradients) are there from the start, tangents from
  the start of the backward; given and held values, outputs and gradients are never dropped;
- an op runs when everything it reads is there; while it runs, all that it writes and its workspace are
  there as well, also when a written value is there already: the copy is freed when the op ends;
- where a drop among those right after a run, in the same list, is of a value that the op takes, what the op
  writes is put in that value's place: the value counts no more from the run on (not in a schedule that says
  that it writes nothing in place);
- nothing that reads a value runs after an op that updates it;
- a forward list runs forward ops only; the backward list may run both;
- a pinned op runs exactly once; a random op that runs more than once holds its saved random state from
  its first run to its last;
- at the end of the forward every output is there, at the end of the backward every gradient.

The stream begins with what is there before the first step. A run is told as what it allocates, `Ran`, and
what is freed when it ends; a drop is one `Free`; between the lists come the tangents and `Boundary`. The
bytes of all `Allocate` less those of all `Free` up to some event are the bytes that are there then. So a
write in the place of a value asks for no bytes, and the drop of that value gives none back.

One pass over the steps, O(steps + reads + writes).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple, NoReturn, TypeAlias

from ..errors import ScheduleError
from .graph import GIVEN_KINDS, Graph, Op
from .schedule import Drop, Run, Schedule, Step

__all__ = ["Allocate", "Boundary", "Event", "Free", "Ran", "events", "taken_by"]

FIXED = "fixed"
"""A band of bytes that no value stands for, there all along; its name is the band's."""
GIVEN = "given"
"""A value that the caller hands to the step: before its first step, or a tangent at the boundary."""
VALUE = "value"
"""A value that an op writes."""
COPY = "copy"
"""A value that an op writes once more while it is there: freed when the op ends."""
STATE = "random state"
"""The saved random state of an op that is recomputed; its name is the op's."""


class Allocate(NamedTuple):
    """Bytes are there from now on; `what` they are is one of the words above.

    What is written `in_place_of` a value has 0 bytes here: it gets those of that value, whose name it is.
    """

    name: str
    bytes: int
    step: int
    what: str = VALUE
    in_place_of: str | None = None


class Free(NamedTuple):
    """Bytes are there no more: of a dropped value, or after a run of a `COPY` or a `STATE`.

    The drop of a value that was written over has 0 bytes here.
    """

    name: str
    bytes: int
    step: int
    what: str = VALUE


class Ran(NamedTuple):
    """An op has run in all that was allocated before this, and in its workspace, which is gone again."""

    op: str
    workspace: int
    step: int


class Boundary(NamedTuple):
    """The moment between forward and backward, before `step`: the caller holds `bytes` more."""

    bytes: int
    step: int


Event: TypeAlias = Allocate | Free | Ran | Boundary


def events(graph: Graph, schedule: Schedule) -> Iterator[Event]:
    """What a schedule does, in order; `ScheduleError` at its first bad step.

    >>> from lowtide import Drop, Graph, Op, Run, Schedule, Value
    >>> values = Value("x", 4, "input"), Value("h", 8), Value("y", 2, "output")
    >>> graph = Graph((Op("up", ("x",), ("h",)), Op("down", ("h",), ("y",), workspace=1)), values)
    >>> for event in events(graph, Schedule((Run("up"), Run("down"), Drop("h")), ())):
    ...     print(event)
    Allocate(name='x', bytes=4, step=0, what='given', in_place_of=None)
    Allocate(name='h', bytes=8, step=0, what='value', in_place_of=None)
    Ran(op='up', workspace=0, step=0)
    Allocate(name='y', bytes=2, step=1, what='value', in_place_of=None)
    Ran(op='down', workspace=1, step=1)
    Free(name='h', bytes=8, step=2, what='value')
    Boundary(bytes=0, step=3)
    """
    judge = _Judge(graph, schedule)
    yield from judge.start()
    yield from judge.replay(schedule.forward, 0)
    yield from judge.cross()
    yield from judge.replay(schedule.backward, judge.boundary)
    judge.finish(len(schedule.steps))


class _Judge:
    """What is there and what has run while a schedule is replayed."""

    def __init__(self, graph: Graph, schedule: Schedule) -> None:
        self.graph = graph
        self.schedule = schedule
        self.boundary = len(schedule.forward)
        self.in_backward = False
        self.there: set[str] = set()
        self.ran: set[str] = set()
        self.updaters = graph.updaters

    @cached_property
    def last_run(self) -> dict[str, int]:
        """The step of each op's last run; only random ops ask for it, and many graphs have none."""
        return {step.op: index for index, step in enumerate(self.schedule.steps) if isinstance(step, Run)}

    def start(self) -> Iterator[Event]:
        """What is there before the first step."""
        for name, size in self.graph.fixed.items():
            yield Allocate(name, size, 0, FIXED)
        for value in self.graph.values:
            if value.kind in GIVEN_KINDS:
                self.there.add(value.name)
                yield Allocate(value.name, value.bytes, 0, GIVEN)

    def replay(self, steps: Sequence[Step], start: int) -> Iterator[Event]:
        """The steps of a list, whose first is step `start` of the schedule."""
        there, value, ran = self.there, self.graph.value, self.ran
        in_place = self.schedule.in_place
        made = tuple.__new__  # half the time of the constructors, and solvers simulate millions of steps
        taken: str | None = None
        for index, step in enumerate(steps, start):
            if isinstance(step, Drop):
                size = self.drop(step.value, index)
                yield made(Free, (step.value, size if step.value != taken else 0, index, VALUE))
                continue
            op = self.allowed(step.op, index)
            again = op.name in ran
            if op.state and not again and index < self.last_run[op.name]:
                yield Allocate(op.name, op.state, index, STATE)
            taken = taken_by(op, steps, index - start) if op.takes and in_place else None
            copies = there.intersection(op.writes) if again else ()
            for name in op.writes:
                size = value[name].bytes if taken is None else 0
                yield made(Allocate, (name, size, index, COPY if name in copies else VALUE, taken))
            yield made(Ran, (op.name, op.workspace, index))
            if copies or (again and op.state):
                yield from self.free_after(op, index, copies)
            there.update(op.writes)
            ran.add(op.name)

    def free_after(self, op: Op, step: int, copies: Collection[str]) -> Iterator[Event]:
        """What goes when an op that ran again ends: copies, the last one first, and its random state."""
        for name in reversed(op.writes):
            if name in copies:
                yield Free(name, self.graph.value[name].bytes, step, COPY)
        if op.state and step == self.last_run[op.name]:
            yield Free(op.name, op.state, step, STATE)

    def allowed(self, name: str, step: int) -> Op:
        """The op of a run, if it may run now."""
        op = self.graph.op.get(name)
        if op is None:
            self.refuse(f"runs {name!r}, which is not an op of the graph", step)
        if op.phase == "backward" and not self.in_backward:
            self.refuse(f"runs {name!r} in the forward, but it depends on a tangent", step)
        if op.kind == "pinned" and name in self.ran:
            self.refuse(f"runs {name!r} again, but it may run only once", step)
        if name in self.updaters and not self.ran.isdisjoint(self.updaters[name]):
            late = next(by for by in self.updaters[name] if by in self.ran)
            self.refuse(f"runs {name!r}, which reads what {late!r} has updated", step)
        if not self.there.issuperset(op.reads):
            missing = next(read for read in op.reads if read not in self.there)
            self.refuse(f"runs {name!r}, which reads {missing!r}, but that is not there", step)
        return op

    def drop(self, name: str, step: int) -> int:
        """Take a value away, if that may be: its bytes."""
        value = self.graph.value.get(name)
        if value is None:
            self.refuse(f"drops {name!r}, which is not a value of the graph", step)
        if name not in self.there:
            self.refuse(f"drops {name!r}, which is not there", step)
        if not value.droppable:
            self.refuse(f"drops {name!r}, but the caller holds it ({value.kind})", step)
        self.there.remove(name)
        return value.bytes

    def cross(self) -> Iterator[Event]:
        """The end of the forward: the tangents come."""
        self.need("output", "at the end of the forward", self.boundary)
        self.need_return_last()
        for value in self.graph.values:
            if value.kind == "tangent":
                self.there.add(value.name)
                yield Allocate(value.name, value.bytes, self.boundary, GIVEN)
        self.in_backward = True
        yield Boundary(self.graph.boundary, self.boundary)

    def need_return_last(self) -> None:
        """Refuse to run anything in the forward once the step has returned what it returns."""
        returning = self.graph.returning
        if returning is None:
            return
        steps = enumerate(self.schedule.forward)
        runs = [(index, step.op) for index, step in steps if isinstance(step, Run)]
        if runs and runs[-1][1] != returning.name:
            index, op = runs[-1]
            self.refuse(f"runs {op!r} after {returning.name!r}, where the forward ends", index)

    def finish(self, step: int) -> None:
        """Refuse a schedule that has left something out."""
        self.need("gradient", "at the end of the backward", step)
        for op in self.graph.ops:
            if op.kind == "pinned" and op.name not in self.ran:
                self.refuse(f"the schedule ends, but {op.name!r}, which must run once, never ran", step)

    def need(self, kind: str, when: str, step: int) -> None:
        for value in self.graph.values:
            if value.kind == kind and value.name not in self.there:
                self.refuse(f"{when} the {kind} {value.name!r} is not there", step)

    def refuse(self, reason: str, step: int) -> NoReturn:
        part = "forward" if step < self.boundary else "backward"
        raise ScheduleError(f"step {step} ({part}): {reason}", step=step)


def taken_by(op: Op, steps: Sequence[Step], place: int) -> str | None:
    """The value in whose place a run puts what it writes: the first of `takes` dropped right after it.

    `steps` are those of a schedule that writes in place, `place` is the run's among them.
    """
    for after in range(place + 1, len(steps)):
        step = steps[after]
        if isinstance(step, Run):
            return None
        if step.value in op.takes:
            return step.value
    return None
