"""What would have to change for a lower peak, in sentences."""

from __future__ import annotations

from collections.abc import Sequence

from ..plans.planned_step import Plan
from ..units import format_bytes, format_seconds
from .peak import WAITING, Alive, Crowd, crowds, least_peak, near_peak
from .place import NO_MODULE
from .residency import Residency
from .wording import short

__all__ = ["advice"]

LARGEST = 3


def advice(shown: Residency, alive: Sequence[Alive], others: Sequence[Plan] = ()) -> list[str]:
    """What waits at the peak and could be dropped, what else has to come down, and where the end is."""
    waiting = [item for item in alive if item.why == WAITING]
    near = [_others_near(shown)] if waiting else []
    return [*_droppable(shown, waiting), *near, *_next_plan(shown.plan, others), _end(shown)]


def _droppable(shown: Residency, waiting: list[Alive]) -> list[str]:
    size = sum(item.bytes for item in waiting)
    rest = format_bytes(shown.timeline.peak - size)
    if not size:
        return [
            f"Nothing waits at the peak: all {rest} are held or in use at that moment, and cannot be dropped."
        ]
    noun = "value waits" if len(waiting) == 1 else "values wait"
    lines = [
        f"{len(waiting)} {noun} at the peak for a later step: {format_bytes(size)}. Only they can be dropped "
        f"there; the other {rest} are held or in use."
    ]
    return lines + [_one(crowd) for crowd in crowds(waiting)[:LARGEST]]


def _one(crowd: Crowd) -> str:
    what = _name(crowd)
    first, last = crowd.until or (0, 0)
    read = f" before step {first}" + (f" to {last}" if last != first else "") if crowd.until else ""
    if crowd.seconds is None:
        return f"{what}: {format_bytes(crowd.bytes)} that may not be recomputed; it has to be read earlier."
    price = f"; that takes {format_seconds(crowd.seconds)}" if crowd.seconds else ""
    return f"Drop {what} for {format_bytes(crowd.bytes)}, and recompute it{read}{price}."


def _name(crowd: Crowd) -> str:
    place, count = crowd.members[0].place, len(crowd.members)
    many = f", {count} values" if count > 1 else ""
    if crowd.where == NO_MODULE:
        return f"{short(place.what)} ({short(place.source)}{many})"
    return f"{short(crowd.where)} ({short(place.what)}{many})"


def _others_near(shown: Residency) -> str:
    near = near_peak(shown)
    if not near:
        return "No other step runs within 1 % of the peak: one change at this step is enough to lower it."
    noun = "step runs" if near == 1 else "steps run"
    return f"{near} other {noun} within 1 % of the peak and would have to come down as well."


def _next_plan(plan: Plan, others: Sequence[Plan]) -> list[str]:
    lower = [other for other in others if other.allocated < plan.allocated]
    if not lower:
        return []
    best = min(lower, key=lambda other: (other.extra, -other.allocated))
    return [
        f"The next plan below, by {short(best.method, 40)}, has a peak of {format_bytes(best.allocated)} at "
        f"{best.extra:+.1%} extra time; this one takes {plan.extra:+.1%}."
    ]


def _end(shown: Residency) -> str:
    least, op = least_peak(shown.graph)
    where = "" if op is None else f", and what {short(op.name)} needs while it runs"
    home = "" if op is None else ", ".join(short(part) for part in (op.module, op.source) if part)
    return (
        f"{_limit(shown, least)}: what is there all along{where}{f' ({home})' if home else ''}. "
        "Below that only a smaller batch or model helps."
    )


def _limit(shown: Residency, least: int) -> str:
    if shown.timeline.peak > least:
        return f"No schedule goes below {format_bytes(least)}"
    return f"No schedule goes below this peak of {format_bytes(least)}"
