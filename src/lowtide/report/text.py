"""The plan as a few lines of plain text: the figures, the timeline as two lines of bars, the peak."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill

from ..plans.planned_step import BY_REPLAY, Plan
from ..units import format_bytes, format_seconds
from .advice import advice
from .bands import aligned, buckets
from .moment import peak_moment
from .peak import alive_at_peak, crowds
from .place import Places
from .residency import Residency, keeping_everything
from .wording import short

__all__ = ["sparkline", "text"]

BARS = " ▁▂▃▄▅▆▇█"
WIDTH = 72
PEAK_ROWS = 6
WIDE = 100


def text(plan: Plan) -> str:
    """The report of a plan for a terminal."""
    return "\n".join([*_figures(plan), "", *_timeline(plan), "", *_peak(plan), *_bound(plan)]) + "\n"


def sparkline(sizes: Sequence[int], *, top: int, width: int = WIDTH) -> str:
    """One bar per bucket of steps, each as high as the largest of its steps; `top` is a full bar."""
    highest = [sizes[bucket.step] for bucket in buckets(sizes, width)]
    last = len(BARS) - 1
    return "".join(BARS[min(-(-size * last // max(top, 1)), last)] for size in highest)


def _figures(plan: Plan) -> list[str]:
    once = format_seconds(plan.seconds - plan.timeline.again)
    rows = [
        ("uncapped peak", format_bytes(plan.uncapped.peak), ""),
        ("budget", plan.budget_in_words, ""),
        (
            "predicted peak",
            format_bytes(plan.allocated),
            f"{plan.allocated / max(plan.uncapped.peak, 1):.1%} of uncapped",
        ),
        *([] if plan.reserved is None else [("reserved", format_bytes(plan.reserved), BY_REPLAY)]),
        ("extra time", f"+{plan.extra:.1%}", f"of {once} ({short(plan.graph.prices, 40)})"),
        ("method", short(plan.method, 40), f"on {short(plan.graph.device, 40)}"),
    ]
    lines = [f"{name:<15} {value:>11}  {more}".rstrip() for name, value, more in rows]
    return lines + [f"note: {short(note, 1000)}" for note in plan.notes]


def _bound(plan: Plan) -> list[str]:
    """What is proven of a plan's time; without a budget nothing is that was not known before."""
    if plan.budget is None or plan.bound is None or plan.gap is None:
        return []
    once = plan.seconds - plan.timeline.again
    return [
        "",
        f"No schedule under this budget takes less than {format_seconds(plan.bound)} "
        f"({plan.bound / once - 1:+.1%}): this one is within {plan.gap:.1%} of the fastest possible.",
    ]


def _timeline(plan: Plan) -> list[str]:
    resident, uncapped = plan.timeline.resident, aligned(plan, keeping_everything(plan).plan)
    top = max(plan.allocated, plan.uncapped.peak)
    width = min(WIDTH, len(resident))
    split = width * plan.timeline.boundary // max(len(resident), 1)
    phases = "forward"[:split].ljust(split) + "│backward"
    return [
        f"{'uncapped':<9} {sparkline(uncapped, top=top)}",
        f"{'planned':<9} {sparkline(resident, top=top)}",
        f"{'':<9} {phases}".rstrip(),
    ]


def _peak(plan: Plan) -> list[str]:
    shown = Residency(plan)
    alive = alive_at_peak(shown, Places(plan.graph))
    rows = crowds(alive)
    lines = [peak_moment(plan)]
    for row in rows[:PEAK_ROWS]:
        first, count = row.members[0], len(row.members)
        many = f"x{count}" if count > 1 else ""
        where, what = short(row.where, 36), short(first.place.what, 28)
        lines.append(f"  {format_bytes(row.bytes):>11}  {where:<36} {many:>4}  {what}, {first.why}")
    rest = rows[PEAK_ROWS:]
    if rest:
        count = sum(len(row.members) for row in rest)
        size = format_bytes(sum(row.bytes for row in rest))
        lines.append(f"  {size:>11}  in {count} others" if count > 1 else f"  {size:>11}  in one other")
    return [*lines, "", "To go lower:", *(_item(line) for line in advice(shown, alive))]


def _item(line: str) -> str:
    return fill(line, WIDE, initial_indent="- ", subsequent_indent="  ")
