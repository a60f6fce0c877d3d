"""What the page's script tells about each bucket of the timeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..plan import Plan
from ..schedule import Run
from ..units import format_bytes
from .bands import Bucket
from .stays import VALUE, Stay, stays
from .svg import Frame
from .wording import describe, short

__all__ = ["hover"]

LARGEST = 5


def hover(plan: Plan, drawn: Sequence[Bucket]) -> dict[str, Any]:
    """Plain data: for each bucket its place, its text and the ids of the largest stays there.

    What is there during the whole step is left out of those: it would be the same everywhere.
    """
    length = len(plan.timeline.resident)
    found = [stay for stay in stays(plan.graph, plan.schedule) if stay.end - stay.start < length]
    found.sort(key=lambda stay: -stay.bytes)
    frame = Frame(length, 1)
    again = _repeated(plan)
    ids: dict[Stay, int] = {}
    records = []
    for bucket in drawn:
        largest = _largest(found, bucket.step)
        records.append(
            {
                "x": round(frame.x(bucket.start), 1),
                "width": round(frame.x(bucket.end) - frame.x(bucket.start), 2),
                "text": _say(plan, bucket, again=bucket.step in again),
                "largest": [ids.setdefault(stay, len(ids)) for stay in largest],
            }
        )
    peak = max(range(len(drawn)), key=lambda at: plan.timeline.resident[drawn[at].step], default=0)
    return {"peak": peak, "values": [_name(plan, stay) for stay in ids], "buckets": records}


def _largest(found: Sequence[Stay], step: int) -> list[Stay]:
    """The first few that are there, of stays sorted by size."""
    largest: list[Stay] = []
    for stay in found:
        if stay.start <= step < stay.end:
            largest.append(stay)
            if len(largest) == LARGEST:
                break
    return largest


def _say(plan: Plan, bucket: Bucket, *, again: bool) -> str:
    phase = "forward" if bucket.step < plan.timeline.boundary else "backward"
    others = bucket.end - bucket.start - 1
    of = f", the largest of {bucket.start} to {bucket.end - 1}" if others else ""
    size = format_bytes(plan.timeline.resident[bucket.step])
    return f"Step {bucket.step} ({phase}{of}): {size}\n{describe(plan, bucket.step, again=again)}"


def _name(plan: Plan, stay: Stay) -> str:
    if stay.what != VALUE:
        return f"{format_bytes(stay.bytes)}  {stay.what} of {short(stay.name)}"
    kind = plan.graph.value[stay.name].kind
    module = plan.graph.writer[stay.name].module if stay.name in plan.graph.writer else ""
    return f"{format_bytes(stay.bytes)}  {short(stay.name)} ({kind}{', ' + short(module) if module else ''})"


def _repeated(plan: Plan) -> set[int]:
    """The steps that run an op again."""
    seen: set[str] = set()
    repeated = set()
    for index, step in enumerate(plan.schedule.steps):
        if isinstance(step, Run):
            if step.op in seen:
                repeated.add(index)
            seen.add(step.op)
    return repeated
