"""A second simulator, written to be obviously right: everything is worked out anew at every step.

It shares no code with `lowtide.simulate` and takes quadratic time.
"""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.plans.graph import Graph
from lowtide.plans.schedule import Drop, Run, Schedule

GIVEN = ("parameter", "buffer", "input", "accumulated")


@dataclass(frozen=True)
class Verdict:
    """What a schedule does, or where it goes wrong (then the rest is empty)."""

    bad_step: int | None
    resident: tuple[int, ...] = ()
    peak: int = 0
    seconds: float = 0.0
    again: float = 0.0


def judge(graph: Graph, schedule: Schedule) -> Verdict:
    steps, split = schedule.steps, len(schedule.forward)
    for index in range(len(steps) + 1):
        if index == split and not all(
            _there(graph, steps, split, index, name) for name in _of(graph, "output")
        ):
            return Verdict(index)
        if index < len(steps) and not _allowed(graph, steps, split, index):
            return Verdict(index)
    end = len(steps)
    if not all(_there(graph, steps, split, end, name) for name in _of(graph, "gradient")):
        return Verdict(end)
    if any(op.kind == "pinned" and Run(op.name) not in steps for op in graph.ops):
        return Verdict(end)
    resident = tuple(_resident(graph, steps, split, index) for index in range(end))
    tangents = sum(value.bytes for value in graph.values if value.kind == "tangent")
    between = _bytes(graph, steps, split, split, before_tangents=True) + graph.boundary + tangents
    runs = [step for step in steps if isinstance(step, Run)]
    once = sum(graph.op[name].seconds for name in {run.op for run in runs})
    total = sum(graph.op[run.op].seconds for run in runs)
    return Verdict(None, resident, max([*resident, between]), total, total - once)


def _of(graph, kind):
    return [value.name for value in graph.values if value.kind == kind]


def _there(graph, steps, split, index, name, before_tangents=False):
    """Whether a value is there right before step `index`: what happened to it last?"""
    for step in reversed(steps[:index]):
        if isinstance(step, Drop) and step.value == name:
            return False
        if isinstance(step, Run) and name in graph.op[step.op].writes:
            return True
    if graph.value[name].kind == "tangent":
        return index >= split and not before_tangents
    return graph.value[name].kind in GIVEN


def _allowed(graph, steps, split, index):
    step = steps[index]
    if isinstance(step, Drop):
        value = graph.value.get(step.value)
        return (
            value is not None
            and value.kind in ("activation", "tangent")
            and not value.held
            and _there(graph, steps, split, index, value.name)
        )
    op = graph.op.get(step.op)
    if op is None or (op.phase == "backward" and index < split):
        return False
    if op.kind == "pinned" and step in steps[:index]:
        return False
    return all(_there(graph, steps, split, index, name) for name in op.reads)


def _bytes(graph, steps, split, index, before_tangents=False):
    """Bytes right before step `index`, saved random states included."""
    live = [v for v in graph.values if _there(graph, steps, split, index, v.name, before_tangents)]
    states = 0
    for op in graph.ops:
        runs = [at for at, step in enumerate(steps) if step == Run(op.name)]
        if len(runs) > 1 and runs[0] < index <= runs[-1]:
            states += op.state
    return sum(graph.fixed.values()) + sum(value.bytes for value in live) + states


def _resident(graph, steps, split, index):
    step = steps[index]
    if isinstance(step, Drop):
        dropped = {step.value, *_replaced(graph, steps, split, index)}
        return _bytes(graph, steps, split, index) - sum(graph.value[name].bytes for name in dropped)
    op = graph.op[step.op]
    first = step not in steps[:index] and step in steps[index + 1 :]
    written = sum(graph.value[name].bytes for name in op.writes)
    if _in_place(graph, steps, split, index):
        written = 0
    return _bytes(graph, steps, split, index) + (op.state if first else 0) + written + op.workspace


def _in_place(graph, steps, split, index):
    """The step and the value of the first drop right after a run that is of a value the op takes."""
    for at in range(index + 1, split if index < split else len(steps)):
        if isinstance(steps[at], Run):
            return None
        if steps[at].value in graph.op[steps[index].op].takes:
            return at, steps[at].value
    return None


def _replaced(graph, steps, split, index):
    """Values in whose place something was written and that are only dropped after a drop."""
    for run in range(index - 1, -1, -1):
        if isinstance(steps[run], Run):
            found = _in_place(graph, steps, split, run) if (run < split) == (index < split) else None
            return [found[1]] if found and found[0] > index else []
    return []
