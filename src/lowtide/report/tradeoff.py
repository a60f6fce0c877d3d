"""Peak against extra time as an SVG: the plans to choose from, the budget, the proven bound, measurements.

The axis of the peaks begins where the plans do, not at zero: no plan is in the part that is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from itertools import pairwise
from typing import TypeAlias

from ..plans.planned_step import Plan
from ..units import format_bytes
from .axes import byte_ticks, share_ticks
from .choices import PlanChoice
from .measured import Measured
from .svg import cross
from .wording import short

__all__ = ["tradeoff"]

WIDTH, HEIGHT = 1000, 300
LEFT, RIGHT, TOP, BOTTOM = 74, 24, 20, 40
FLOOR = HEIGHT - BOTTOM
LETTER, LINE = 7, 14
"""The room that a letter and a line of text take."""

_Box: TypeAlias = tuple[float, float, float, float]


class _Axes:
    def __init__(self, peaks: Sequence[int], extras: Sequence[float]) -> None:
        self.bytes = max(max(peaks) * 103 // 100, 1)
        low = min(filter(None, peaks), default=0) * 9 // 10
        self.low = low if low > self.bytes // 4 else 0
        self.extra = max(1.12 * max(extras), 0.01)

    def x(self, size: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (size - self.low) / (self.bytes - self.low)

    def y(self, extra: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * extra / self.extra

    def at(self, size: float, extra: float) -> str:
        return f"{self.x(size):.1f},{self.y(extra):.1f}"


def tradeoff(plan: Plan, found: Sequence[PlanChoice], measured: Measured) -> str:
    """The picture as an `<svg>` element; its points carry the number of their choice."""
    peaks = [choice.plan.allocated for choice in found] + [measured.peak or 0, measured.uncapped_peak or 0]
    axes = _Axes(peaks, [choice.plan.extra for choice in found] + [measured.extra or 0.0])
    parts = [
        *_grid(axes),
        _budget(plan, axes),
        _bound(plan, axes),
        _stairs(found, axes),
        *(_ring(choice, axes) for choice in found if choice.is_knee),
        *(_point(index, choice, axes) for index, choice in enumerate(found)),
        *_names(plan, found, axes),
        *_measured(measured, axes),
    ]
    return (
        f'<svg id="tradeoff" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="Peak bytes against extra time of {len(found)} plans">{"".join(parts)}</svg>'
    )


def _grid(axes: _Axes) -> Iterable[str]:
    for share in share_ticks(axes.extra):
        y = f"{axes.y(share):.1f}"
        yield f'<path class="grid" d="M{LEFT},{y}H{WIDTH - RIGHT}"/>'
        yield f'<text x="{LEFT - 8}" y="{y}" dy="0.35em" text-anchor="end">+{share * 100:g}%</text>'
    for size, label in byte_ticks(axes.bytes):
        if size < axes.low:
            continue
        x = f"{axes.x(size):.1f}"
        yield f'<text x="{x}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{label}</text>'
    yield f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 6}" text-anchor="end">predicted peak</text>'
    yield f'<text x="{LEFT}" y="{TOP - 8}">extra time</text>'


def _budget(plan: Plan, axes: _Axes) -> str:
    if plan.budget is None or plan.budget > axes.bytes:
        return ""
    x = axes.x(plan.budget)
    left, _, right, bottom = _budget_box(plan.budget, axes)
    side = f'x="{right:.1f}" text-anchor="end"' if right < x else f'x="{left:.1f}"'
    return (
        f'<path class="budget" d="M{x:.1f},{TOP}V{HEIGHT - BOTTOM}"/>'
        f'<text class="budget-label" {side} y="{bottom:g}">{_budget_text(plan.budget)}</text>'
    )


def _budget_text(budget: int) -> str:
    return f"budget {format_bytes(budget)}"


def _budget_box(budget: int, axes: _Axes) -> _Box:
    """The room of the budget's name, at the top of its line."""
    x, wide = axes.x(budget), LETTER * len(_budget_text(budget))
    left = x - 6 - wide if x > WIDTH - 220 else x + 6
    return (left, TOP + 10 - LINE, left + wide, TOP + 10)


def _bound(plan: Plan, axes: _Axes) -> str:
    """A line that no plan under the budget goes below."""
    once = plan.seconds - plan.timeline.again
    if plan.budget is None or plan.bound is None or once <= 0 or plan.bound <= once:
        return ""
    least = plan.bound / once - 1
    right = axes.x(min(plan.budget, axes.bytes))
    return (
        f'<path class="bound" d="M{LEFT},{axes.y(least):.1f}H{right:.1f}">'
        f"<title>no schedule under this budget takes less than {least:+.1%}</title></path>"
    )


def _stairs(found: Sequence[PlanChoice], axes: _Axes) -> str:
    """The frontier as steps: for a budget between two plans the smaller one is the answer."""
    line = [choice.plan for choice in found if choice.sort == "frontier"]
    if len(line) < 2:
        return ""
    corners = [axes.at(line[0].allocated, line[0].extra)]
    for before, after in pairwise(line):
        corners += [axes.at(before.allocated, after.extra), axes.at(after.allocated, after.extra)]
    return f'<path class="stairs" d="M{"L".join(corners)}"/>'


def _point(index: int, choice: PlanChoice, axes: _Axes) -> str:
    x, y = axes.x(choice.plan.allocated), axes.y(choice.plan.extra)
    radius = {"this": 7, "uncapped": 6, "other": 5}.get(choice.sort, 4)
    says = f"{short(choice.label)}: {format_bytes(choice.plan.allocated)}, {choice.plan.extra:+.1%}"
    return (
        f'<circle class="point point-{choice.sort}" data-choice="{index}" cx="{x:.1f}" cy="{y:.1f}" '
        f'r="{radius}"><title>{escape(says)}</title></circle>'
    )


def _ring(choice: PlanChoice, axes: _Axes) -> str:
    """A ring around the knee, whichever plan it is."""
    x, y = axes.x(choice.plan.allocated), axes.y(choice.plan.extra)
    return (
        f'<circle class="knee" cx="{x:.1f}" cy="{y:.1f}" r="10">'
        "<title>the knee: below it a percent of memory costs more than a percent of time</title></circle>"
    )


def _names(plan: Plan, found: Sequence[PlanChoice], axes: _Axes) -> Iterable[str]:
    """Names beside the points that are not the frontier's, each at the first side where there is room."""
    points = ((axes.x(choice.plan.allocated), axes.y(choice.plan.extra)) for choice in found)
    taken: list[_Box] = [(x - 4, y - 4, x + 4, y + 4) for x, y in points]
    if plan.budget is not None and plan.budget <= axes.bytes:
        taken.append(_budget_box(plan.budget, axes))
    named = [choice for choice in found if choice.sort != "frontier" or choice.is_knee]
    for choice in sorted(named, key=lambda choice: choice.sort == "other"):
        text = {"this": "this plan", "uncapped": "keeping everything", "frontier": "knee"}.get(choice.sort)
        text = text or short(choice.label, 40)
        box = _free(axes.x(choice.plan.allocated), axes.y(choice.plan.extra), LETTER * len(text), taken)
        taken.append(box)
        yield f'<text class="name name-{choice.sort}" x="{box[0]:.1f}" y="{box[3]:.1f}">{escape(text)}</text>'


def _free(x: float, y: float, wide: float, taken: Sequence[_Box]) -> _Box:
    """Left, top, right and bottom of a text near a point that meets no other text."""
    places = [(x + dx, y + dy) for dy in (-9, 20, -25, 36, -41) for dx in (10, -10 - wide)]
    boxes = [(left, bottom - LINE, left + wide, bottom) for left, bottom in places]
    inside = [box for box in boxes if box[0] >= LEFT and box[2] <= WIDTH and box[1] >= 0 and box[3] <= FLOOR]
    free = [box for box in inside if not any(_meet(box, other) for other in taken)]
    return (free or inside or boxes)[0]


def _meet(one: _Box, other: _Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _measured(measured: Measured, axes: _Axes) -> Iterable[str]:
    if measured.peak is None or measured.extra is None:
        return
    pairs = [(measured.peak, measured.extra, "capped"), (measured.uncapped_peak or 0, 0.0, "uncapped")]
    for size, extra, name in pairs:
        x, y = axes.x(size), axes.y(max(extra, 0.0))
        says = f"measured, {name}: {format_bytes(size)}, {extra:+.1%}"
        yield f'<path class="measured" d="{cross(x, y)}"><title>{says}</title></path>'
