"""The plan as a few lines of plain text: the figures, the timeline as two lines of bars, the peak."""

from __future__ import annotations

from collections.abc import Sequence

from ..plan import Plan
from ..units import format_bytes, format_seconds
from .bands import buckets, uncapped_line
from .tables import alive_at_peak
from .wording import peak_moment, short

__all__ = ["sparkline", "text"]

BARS = " ▁▂▃▄▅▆▇█"
WIDTH = 72
PEAK_ROWS = 5


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
    budget = "none" if plan.budget is None else format_bytes(plan.budget)
    rows = [
        ("uncapped peak", format_bytes(plan.uncapped.peak), ""),
        ("budget", budget, ""),
        (
            "predicted peak",
            format_bytes(plan.peak),
            f"{plan.peak / max(plan.uncapped.peak, 1):.1%} of uncapped",
        ),
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
    resident, uncapped = plan.timeline.resident, uncapped_line(plan)
    top = max(plan.peak, plan.uncapped.peak)
    width = min(WIDTH, len(resident))
    split = width * plan.timeline.boundary // max(len(resident), 1)
    phases = "forward"[:split].ljust(split) + "│backward"
    return [
        f"{'uncapped':<9} {sparkline(uncapped, top=top)}",
        f"{'planned':<9} {sparkline(resident, top=top)}",
        f"{'':<9} {phases}".rstrip(),
    ]


def _peak(plan: Plan) -> list[str]:
    rows = alive_at_peak(plan)
    lines = [peak_moment(plan)]
    for row in rows[:PEAK_ROWS]:
        where = ", ".join(short(part, 40) for part in (row.module, row.source) if part)
        lines.append(
            f"  {format_bytes(row.bytes):>11}  {short(row.name, 30):<30}  {row.kind:<11} {where}".rstrip()
        )
    rest = rows[PEAK_ROWS:]
    if rest:
        lines.append(f"  {format_bytes(sum(row.bytes for row in rest)):>11}  in {len(rest)} others")
    return lines
