"""The timeline as an SVG: bands over the steps, what keeping everything takes, what is reserved, the budget.

Drawn as steps, not slopes: between two steps nothing is half allocated. Neighbouring steps are joined into
buckets, each shown by its largest step, so the picture's size does not grow with the graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from ..plans.planned_step import Plan
from ..units import format_bytes
from .axes import byte_ticks, step_ticks
from .bands import Band, Bucket
from .wording import short

__all__ = ["Frame", "Mark", "chart", "cross", "shades", "top_of"]

WIDTH, HEIGHT = 1000, 380
LEFT, RIGHT, TOP, BOTTOM = 74, 12, 26, 34
FIXED_SHADES = 3
LABEL = 60
"""The room that the name of a phase takes."""


@dataclass(frozen=True, slots=True)
class Frame:
    """Where steps and bytes lie in the picture."""

    steps: int
    bytes: int

    def x(self, step: float) -> float:
        """The left edge of a step."""
        return LEFT + (WIDTH - LEFT - RIGHT) * step / max(self.steps, 1)

    def y(self, size: float) -> float:
        """The height of a number of bytes."""
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * size / max(self.bytes, 1)


@dataclass(frozen=True, slots=True)
class Mark:
    """A number of bytes at a step that is drawn as a cross: something that was measured."""

    step: int
    bytes: int
    says: str


def chart(
    plan: Plan,
    layers: Sequence[Band],
    drawn: Sequence[Bucket],
    uncapped: Sequence[int],
    marks: Sequence[Mark] = (),
    points: Sequence[tuple[int, int]] = (),
) -> str:
    """The picture as an `<svg>` element; its cursor is moved by the page's script.

    `uncapped` are the resident bytes of keeping everything, on the steps of the plan; `points` are bytes
    that were measured at some steps, drawn where they are the largest of a bucket.
    """
    frame = Frame(len(plan.timeline.resident), top_of(plan, marks))
    parts = [
        *_grid(frame),
        *_stack(frame, layers, drawn),
        _uncapped(frame, drawn, uncapped),
        _reserved(plan, frame),
        _boundary(plan, frame),
        _budget(plan, frame),
        _points(frame, drawn, dict(points)),
        *(_mark(mark, frame) for mark in marks),
        f'<rect id="cursor" class="cursor" y="{TOP}" height="{HEIGHT - TOP - BOTTOM}" width="0"/>',
    ]
    label = f"Resident bytes over {frame.steps} steps, at most {format_bytes(plan.allocated)}"
    return (
        f'<svg id="timeline" viewBox="0 0 {WIDTH} {HEIGHT}" tabindex="0" role="img" '
        f'aria-label="{escape(label)}">{"".join(parts)}</svg>'
    )


def shades(layers: Sequence[Band]) -> list[str]:
    """The CSS class of each band; fixed bands take turns with a few shades."""
    fixed = iter(range(len(layers)))
    return [
        f"band-fixed-{next(fixed) % FIXED_SHADES}" if band.role == "fixed" else f"band-{band.role.split()[0]}"
        for band in layers
    ]


def top_of(plan: Plan, marks: Sequence[Mark] = ()) -> int:
    """The axis' end. A budget far above both peaks stays outside: it would flatten all else."""
    highest = max(plan.peak, plan.timeline.peak, plan.uncapped.peak, *(mark.bytes for mark in marks))
    if plan.budget is not None and plan.budget <= 1.5 * highest:
        highest = max(highest, plan.budget)
    return max(highest * 105 // 100, 1)


def _stack(frame: Frame, layers: Sequence[Band], drawn: Sequence[Bucket]) -> Iterable[str]:
    floor = [0] * len(drawn)
    for band, shade in zip(layers, shades(layers), strict=True):
        top = [low + band.resident[bucket.step] for low, bucket in zip(floor, drawn, strict=True)]
        edge, back = _edge(frame, drawn, top), _edge(frame, drawn, floor, backwards=True)
        yield f'<path class="{shade}" d="M{edge}L{back}Z"><title>{escape(short(band.name))}</title></path>'
        floor = top


def _edge(frame: Frame, drawn: Sequence[Bucket], sizes: Sequence[int], *, backwards: bool = False) -> str:
    """The corners of a stepped line; a corner that would not turn is left out."""
    corners: list[tuple[str, str]] = []
    for bucket, size in zip(drawn, sizes, strict=True):
        height = f"{frame.y(size):.1f}"
        if corners and corners[-1][1] == height:
            corners.pop()
        else:
            corners.append((f"{frame.x(bucket.start):.1f}", height))
        corners.append((f"{frame.x(bucket.end):.1f}", height))
    ordered = reversed(corners) if backwards else corners
    return "L".join(f"{x},{y}" for x, y in ordered)


def _grid(frame: Frame) -> Iterable[str]:
    for size, label in byte_ticks(frame.bytes):
        y = f"{frame.y(size):.1f}"
        yield f'<path class="grid" d="M{LEFT},{y}H{WIDTH - RIGHT}"/>'
        yield f'<text class="tick" x="{LEFT - 8}" y="{y}" dy="0.35em" text-anchor="end">{label}</text>'
    for step in step_ticks(frame.steps):
        x = f"{frame.x(step):.1f}"
        yield f'<text class="tick" x="{x}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{step}</text>'


def _uncapped(frame: Frame, drawn: Sequence[Bucket], line: Sequence[int]) -> str:
    if not drawn:
        return ""
    highest = [max(line[bucket.start : bucket.end]) for bucket in drawn]
    return f'<path class="uncapped" d="M{_edge(frame, drawn, highest)}"/>'


def _reserved(plan: Plan, frame: Frame) -> str:
    """The band between what is allocated at the peak and what is reserved for it."""
    if plan.reserved is None:
        return ""
    top, low = frame.y(plan.reserved), frame.y(plan.allocated)
    most = format_bytes(plan.allocated)
    says = f"reserved {format_bytes(plan.reserved)}, of which {most} are allocated at the peak"
    return (
        f'<path class="reserved" d="M{LEFT},{top:.1f}H{WIDTH - RIGHT}V{low:.1f}H{LEFT}Z">'
        f"<title>{escape(says)}</title></path>"
    )


def _boundary(plan: Plan, frame: Frame) -> str:
    """The end of the forward; a phase without room for its name has no or hardly any steps."""
    x = frame.x(plan.timeline.boundary)
    line = f'<path class="boundary" d="M{x:.1f},{TOP - 18}V{HEIGHT - BOTTOM}"/>'
    if x > LEFT + LABEL:
        line += f'<text class="phase" x="{x - 7:.1f}" y="{TOP - 9}" text-anchor="end">forward</text>'
    if x < WIDTH - RIGHT - LABEL:
        line += f'<text class="phase" x="{x + 7:.1f}" y="{TOP - 9}">backward</text>'
    return line


def _budget(plan: Plan, frame: Frame) -> str:
    if plan.budget is None or plan.budget > frame.bytes:
        return ""
    y = frame.y(plan.budget)
    return (
        f'<path class="budget" d="M{LEFT},{y:.1f}H{WIDTH - RIGHT}"/>'
        f'<text class="budget-label" x="{WIDTH - RIGHT - 4}" y="{y - 5:.1f}" text-anchor="end">'
        f"budget {format_bytes(plan.budget)}</text>"
    )


def _points(frame: Frame, drawn: Sequence[Bucket], points: dict[int, int]) -> str:
    found = []
    for bucket in drawn if points else ():
        sizes = [points[step] for step in range(bucket.start, bucket.end) if step in points]
        if sizes:
            middle = frame.x((bucket.start + bucket.end) / 2)
            found.append(f"M{middle:.1f},{frame.y(max(sizes)):.1f}h0")
    return f'<path class="seen" d="{"".join(found)}"/>' if found else ""


def _mark(mark: Mark, frame: Frame) -> str:
    x, y = frame.x(mark.step + 0.5), frame.y(mark.bytes)
    return f'<path class="measured" d="{cross(x, y)}"><title>{escape(mark.says)}</title></path>'


def cross(x: float, y: float) -> str:
    """The path of a small cross."""
    return f"M{x - 5:.1f},{y - 5:.1f}l10,10M{x - 5:.1f},{y + 5:.1f}l10,-10"
