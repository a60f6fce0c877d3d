"""The timeline split into bands, one number per band and step; they add up to `timeline.resident`.

Fixed bands keep their names. A value belongs to the band of its kind where the caller holds it; all other
bytes are told apart by what the schedule did: `kept` was written in the forward and is there when the
backward begins, `recomputed` was written by a repeated run, and `transient` is the rest (values that come
and go, tangents, workspaces, saved random states).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from ..plans.graph import Graph
from ..plans.planned_step import Plan
from ..plans.schedule import Run, Schedule
from .residency import Residency
from .stays import VALUE, Stay

__all__ = ["Band", "Bucket", "aligned", "bands", "buckets", "role_of"]

_BY_KIND = {
    "parameter": "parameters and buffers",
    "buffer": "parameters and buffers",
    "input": "inputs",
    "accumulated": "gradients",
    "gradient": "gradients",
    "tangent": "transient",
}
_ORDER = ("parameters and buffers", "inputs", "gradients", "kept", "recomputed", "transient")


@dataclass(frozen=True, slots=True)
class Band:
    """A named part of the resident bytes; `role` is "fixed" or the band's own name."""

    name: str
    role: str
    resident: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Bucket:
    """Neighbouring steps drawn as one: `start` up to `end`, shown by the largest of them, `step`."""

    start: int
    end: int
    step: int


def bands(shown: Residency) -> list[Band]:
    """The bands from the bottom up: the fixed ones, then those of the step. Empty ones are left out."""
    length = len(shown.timeline.resident)
    changes = {("fixed", name): [0] * (length + 1) for name in shown.graph.fixed}
    changes |= {(role, role): [0] * (length + 1) for role in _ORDER}
    for stay in shown.stays:
        role = role_of(stay, shown.graph)
        change = changes[role, stay.name if role == "fixed" else role]
        change[stay.start] += stay.bytes
        change[stay.end] -= stay.bytes
    lines = ((key, tuple(accumulate(change))[:length]) for key, change in changes.items())
    return [Band(name, role, line) for (role, name), line in lines if any(line)]


def role_of(stay: Stay, graph: Graph) -> str:
    """The band of a stay: "fixed" or one of the step's own bands."""
    if stay.what == "fixed":
        return "fixed"
    if stay.what != VALUE:
        return "transient"
    named = _BY_KIND.get(graph.value[stay.name].kind)
    if named:
        return named
    return "kept" if stay.crosses else "recomputed" if stay.again else "transient"


def buckets(resident: Sequence[int], most: int) -> list[Bucket]:
    """At most `most` runs of steps of about equal length; the largest step of each is never lost."""
    count = min(most, len(resident))
    edges = [len(resident) * index // count for index in range(count + 1)] if count else []
    return [Bucket(a, b, max(range(a, b), key=resident.__getitem__)) for a, b in pairwise(edges)]


def aligned(plan: Plan, other: Plan) -> tuple[int, ...]:
    """Resident bytes of another plan of the same graph, on the steps of this one.

    The two schedules have different steps, so they are aligned by op: where this plan runs an op for the
    first time, the line shows the other one at that op; where it only recomputes the line is flat.
    Between two such points it shows the larger one, so that its maximum is the one of all steps.
    """
    resident = other.timeline.resident
    line: list[int] = []
    before = 0
    for index in _reached(plan.schedule, other.schedule):
        line.append(max(resident[before : index + 1], default=line[-1] if line else 0))
        before = max(before, index + 1)
    return tuple(line)


def _reached(plan: Schedule, other: Schedule) -> list[int]:
    """For each step of a schedule, the last step of the other one that it has come to."""
    place: dict[str, int] = {}
    steps, last = plan.steps, len(other.steps) - 1
    for index, step in enumerate(other.steps):
        if isinstance(step, Run):
            place.setdefault(step.op, index)
    at = -1
    reached = []
    for step in steps:
        at = max(at, place.get(step.op, at) if isinstance(step, Run) else at)
        reached.append(at)
    return [*reached[:-1], last] if steps else []
