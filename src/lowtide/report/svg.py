"""The timeline as an SVG: bands stacked over the steps, the uncapped line, the budget, the boundary.

Drawn as steps, not slopes: between two steps nothing is half allocated. Neighbouring steps are joined into
buckets, each shown by its largest step, so the picture's size does not grow with the graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from ..plan import Plan
from ..units import format_bytes
from .bands import Band, Bucket, uncapped_line
from .wording import short

__all__ = ["Frame", "chart", "shades"]

WIDTH, HEIGHT = 1000, 380
LEFT, RIGHT, TOP, BOTTOM = 74, 12, 26, 34
FIXED_SHADES = 3


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


def chart(plan: Plan, layers: Sequence[Band], drawn: Sequence[Bucket]) -> str:
    """The picture as an `<svg>` element; its cursor is moved by the page's script."""
    frame = Frame(len(plan.timeline.resident), _top(plan))
    parts = [
        *_grid(frame),
        *_stack(frame, layers, drawn),
        _uncapped(plan, frame, drawn),
        _boundary(plan, frame),
        _budget(plan, frame),
        f'<rect id="cursor" class="cursor" y="{TOP}" height="{HEIGHT - TOP - BOTTOM}" width="0"/>',
    ]
    label = f"Resident bytes over {frame.steps} steps, at most {format_bytes(plan.peak)}"
    return (
        f'<svg id="timeline" viewBox="0 0 {WIDTH} {HEIGHT}" tabindex="0" role="img" '
        f'aria-label="{escape(label)}" aria-describedby="readout">{"".join(parts)}</svg>'
    )


def shades(layers: Sequence[Band]) -> list[str]:
    """The CSS class of each band; fixed bands take turns with a few shades."""
    fixed = iter(range(len(layers)))
    return [
        f"band-fixed-{next(fixed) % FIXED_SHADES}" if band.role == "fixed" else f"band-{band.role.split()[0]}"
        for band in layers
    ]


def _top(plan: Plan) -> int:
    """The axis' end. A budget far above both peaks stays outside: it would flatten all else."""
    highest = max(plan.peak, plan.uncapped.peak)
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
    for size, label in _byte_ticks(frame.bytes):
        y = f"{frame.y(size):.1f}"
        yield f'<path class="grid" d="M{LEFT},{y}H{WIDTH - RIGHT}"/>'
        yield f'<text class="tick" x="{LEFT - 8}" y="{y}" dy="0.35em" text-anchor="end">{label}</text>'
    for step in _step_ticks(frame.steps):
        x = f"{frame.x(step):.1f}"
        yield f'<text class="tick" x="{x}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{step}</text>'


def _byte_ticks(top: int) -> list[tuple[int, str]]:
    """Four to eight round numbers of one binary unit, from zero."""
    power = min(max(top.bit_length() - 1, 0) // 10, 4)
    unit, size = ("B", "KiB", "MiB", "GiB", "TiB")[power], 1024**power
    gap = next((gap for gap in _round_numbers() if top / size / gap <= 8), 1e9)
    ticks = (index * gap for index in range(9) if index * gap * size <= top)
    return [(int(tick * size), f"{tick:g} {unit}") for tick in ticks]


def _step_ticks(steps: int) -> list[int]:
    gap = next(int(gap) for gap in _round_numbers() if gap >= 1 and steps / gap <= 10)
    return list(range(0, steps, gap))


def _round_numbers() -> Iterable[float]:
    return (digit * 10.0**power for power in range(-2, 13) for digit in (1, 2, 5))


def _uncapped(plan: Plan, frame: Frame, drawn: Sequence[Bucket]) -> str:
    if not drawn:
        return ""
    line = uncapped_line(plan)
    highest = [max(line[bucket.start : bucket.end]) for bucket in drawn]
    return f'<path class="uncapped" d="M{_edge(frame, drawn, highest)}"/>'


def _boundary(plan: Plan, frame: Frame) -> str:
    x = frame.x(plan.timeline.boundary)
    return (
        f'<path class="boundary" d="M{x:.1f},{TOP - 18}V{HEIGHT - BOTTOM}"/>'
        f'<text class="phase" x="{x - 7:.1f}" y="{TOP - 9}" text-anchor="end">forward</text>'
        f'<text class="phase" x="{x + 7:.1f}" y="{TOP - 9}">backward</text>'
    )


def _budget(plan: Plan, frame: Frame) -> str:
    if plan.budget is None or plan.budget > frame.bytes:
        return ""
    y = frame.y(plan.budget)
    return (
        f'<path class="budget" d="M{LEFT},{y:.1f}H{WIDTH - RIGHT}"/>'
        f'<text class="budget-label" x="{WIDTH - RIGHT - 4}" y="{y - 5:.1f}" text-anchor="end">'
        f"budget {format_bytes(plan.budget)}</text>"
    )
