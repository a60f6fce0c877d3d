"""The peak: exactly what is there, why it is there, and what would have to change to go lower.

Each thing that is there at the peak is `held` (no schedule may drop it), `in use` (the op at the peak reads
or writes it, or it is the op's workspace) or `waiting`: it was written before and is read later. Only what
waits can be dropped at that moment, at the price of recomputing it before the next read.
O(steps + reads).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ..plans.graph import GIVEN_KINDS, Graph, Op
from ..plans.planned_step import Plan
from ..plans.schedule import Run
from .fold import Fold, fold
from .place import Place, Places
from .residency import Residency
from .stays import VALUE, Stay

__all__ = ["Alive", "Crowd", "alive_at_peak", "crowds", "least_peak", "near_peak", "peak_is_between"]

HELD, IN_USE, WAITING = "held", "in use", "waiting"
NEAR = 0.99


@dataclass(frozen=True, slots=True)
class Alive:
    """Something that is there at the peak; `until` is the step that reads it next, where it waits for one."""

    stay: Stay
    place: Place
    why: str
    until: int | None = None
    seconds: float | None = None
    """What recomputing it takes; None where its op may run only once."""

    @property
    def bytes(self) -> int:
        """Its bytes."""
        return self.stay.bytes


@dataclass(frozen=True, slots=True)
class Crowd(Fold[Alive]):
    """Things at the peak that are alike."""

    @property
    def until(self) -> tuple[int, int] | None:
        """The first and the last step at which a member is read next."""
        steps = [member.until for member in self.members if member.until is not None]
        return (min(steps), max(steps)) if steps else None

    @property
    def seconds(self) -> float | None:
        """What recomputing them takes; None where one of their ops may run only once."""
        ops = {member.stay.name: member.seconds for member in self.members}
        return None if None in ops.values() else sum(filter(None, ops.values()))


def peak_is_between(plan: Plan) -> bool:
    """Whether the peak is reached between the forward and the backward, not while a step runs."""
    resident = plan.timeline.resident
    return not resident or resident[plan.timeline.peak_step] != plan.timeline.peak


def at_peak(shown: Residency) -> list[Stay]:
    """The stays that make up the simulated peak, largest first: their bytes add up to it."""
    step = shown.timeline.peak_step
    if peak_is_between(shown.plan):
        alive = [stay for stay in shown.stays if stay.crosses]
        caller = Stay("held by the caller between forward and backward", shown.graph.boundary, step, step)
        alive.append(replace(caller, what="caller", crosses=True))
    else:
        alive = [stay for stay in shown.stays if stay.start <= step < stay.end]
    return sorted((stay for stay in alive if stay.bytes), key=lambda stay: (-stay.bytes, stay.name))


def alive_at_peak(shown: Residency, places: Places) -> list[Alive]:
    """Everything that is there at the peak and why, largest first."""
    graph, op = shown.graph, _op_at_peak(shown)
    used = {*op.reads, *op.writes} if op else set()
    after = shown.timeline.boundary if op is None else shown.timeline.peak_step + 1
    next_read = _next_reads(shown, after)
    return [
        _alive(stay, graph, used, next_read.get(stay.name), places.of_stay(stay)) for stay in at_peak(shown)
    ]


def crowds(alive: Iterable[Alive]) -> list[Crowd]:
    """What is there at the peak with identical layers folded, largest first."""
    found = fold(alive, path=lambda item: item.place.path, alike=_alike)
    return sorted((Crowd(item.where, item.members) for item in found), key=lambda crowd: -crowd.bytes)


def near_peak(shown: Residency) -> int:
    """How many steps besides that of the peak run an op within 1 % of it: they have to come down as well."""
    enough, at = NEAR * shown.timeline.peak, shown.timeline.peak_step
    near = (index for index, size in enumerate(shown.timeline.resident) if size >= enough and index != at)
    return sum(isinstance(shown.steps[index], Run) for index in near)


def least_peak(graph: Graph) -> tuple[int, Op | None]:
    """What no schedule goes below: what is there all along, and what one op needs while it runs.

    The op is the one that needs the most, None for a graph without ops.
    """
    always = graph.fixed_bytes + graph.given_bytes
    needs = [(_needs(op, graph), index) for index, op in enumerate(graph.ops)]
    most, index = max(needs, default=(0, -1))
    return always + most, graph.ops[index] if needs else None


def _needs(op: Op, graph: Graph) -> int:
    """Bytes besides what is there all along; a value that the op may write in place of counts once."""
    value = graph.value
    names = {name for name in (*op.reads, *op.writes) if value[name].kind not in GIVEN_KINDS}
    spared = max((value[name].bytes for name in op.takes if name in names), default=0)
    return sum(value[name].bytes for name in names) + op.workspace - spared


def _op_at_peak(shown: Residency) -> Op | None:
    if peak_is_between(shown.plan):
        return None
    step = shown.steps[shown.timeline.peak_step]
    return shown.graph.op[step.op] if isinstance(step, Run) else None


def _next_reads(shown: Residency, after: int) -> dict[str, int]:
    found: dict[str, int] = {}
    for index in range(after, len(shown.steps)):
        step = shown.steps[index]
        if isinstance(step, Run):
            for name in shown.graph.op[step.op].reads:
                found.setdefault(name, index)
    return found


def _alive(stay: Stay, graph: Graph, used: set[str], until: int | None, place: Place) -> Alive:
    if stay.what in ("fixed", "caller"):
        return Alive(stay, place, HELD)
    if stay.what == "random state":
        return Alive(stay, place, WAITING)
    if stay.what != VALUE or stay.name in used:
        held = stay.what == VALUE and graph.value[stay.name].kind in GIVEN_KINDS
        return Alive(stay, place, HELD if held else IN_USE)
    writer = graph.writer.get(stay.name)
    if not graph.value[stay.name].droppable:
        return Alive(stay, place, HELD)
    seconds = writer.seconds if writer and writer.kind != "pinned" else None
    return Alive(stay, place, WAITING, until, seconds)


def _alike(item: Alive) -> tuple[str, str, str, bool]:
    return item.place.what, item.place.source, item.why, item.seconds is None
