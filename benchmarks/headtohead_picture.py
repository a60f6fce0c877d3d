"""The picture of the head-to-head for one model: peak memory across, step time upwards, an SVG file.

Every tool has a shape and a colour of its own. The points of Lowtide that no other of the same executor beats
are joined by a staircase: between two of them, the one with the smaller peak is the answer. Points with wrong
gradients are drawn hollow. Settings stand beside their points where there is room; pointing at one tells the
rest. The memory axis begins at nothing, that of the time below the fastest point.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from math import ceil, floor, log10

from drawing import DARK
from headtohead_results import NAMES, OURS, point_text
from row_files import Row

WIDTH, HEIGHT = 760, 520
LEFT, RIGHT, TOP, BOTTOM = 60, 24, 48, 118
INK, SOFT, RULE = "#17212b", "#5b6875", "#dfe5ea"
GIB = 2**30

COLOURS = {
    "eager": "#17212b",
    "checkpoint": "#8463c4",
    "selective": "#2a9d8f",
    "compile": "#cc2b3d",
    "lowtide-eager": "#5488d8",
    "lowtide-inductor": "#123f8c",
}
SHAPES = {
    "eager": "M-5,-5H5V5H-5Z",
    "checkpoint": "M0,-6L6,5H-6Z",
    "selective": "M0,6L6,-5H-6Z",
    "compile": "M-6,-3.5L-3.5,-6L0,-2.5L3.5,-6L6,-3.5L2.5,0L6,3.5L3.5,6L0,2.5L-3.5,6L-6,3.5L-2.5,0Z",
    "lowtide-eager": "M0,-7L7,0L0,7L-7,0Z",
    "lowtide-inductor": "M-6,0A6,6 0 1 0 6,0A6,6 0 1 0 -6,0Z",
}
DASHES = {"lowtide-eager": "6 4", "lowtide-inductor": "none"}


class Axis:
    """Where numbers lie in pixels, from `low` to a little above the largest."""

    def __init__(self, values: Iterable[float], first: float, last: float, *, low: float = 0.0) -> None:
        self.low, self.top = low, 1.05 * max(values)
        self.first, self.last = first, last

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.top - self.low)
        return round(self.first + share * (self.last - self.first), 1)

    def ticks(self) -> list[float]:
        """Four to ten round numbers."""
        span = self.top - self.low
        step = 10.0 ** floor(log10(span))
        step = next(step / part for part in (1, 2, 5, 10) if span * part / step >= 5)
        return [step * index for index in range(ceil(self.low / step), floor(self.top / step) + 1)]


def picture(title: str, rows: Sequence[Row]) -> str:
    """The SVG file of the rows of one model, all of which ran."""
    across = Axis((row["peak"] / GIB for row in rows), LEFT, WIDTH - RIGHT)
    times = [row["milliseconds"] for row in rows]
    up = Axis(times, HEIGHT - BOTTOM, TOP, low=0.85 * min(times))
    places = [(across(row["peak"] / GIB), up(row["milliseconds"])) for row in rows]
    tools = [tool for tool in NAMES if any(row["tool"] == tool for row in rows)]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(title)}: peak memory against step time" '
        f'font-family="system-ui,sans-serif" font-size="12" fill="{SOFT}">',
        DARK,
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="26" font-size="15" font-weight="600" fill="{INK}">{escape(title)}</text>',
        *grid(across, up),
        *(staircase(tool, rows, across, up) for tool in tools if tool in OURS),
        *(mark(row, *place) for row, place in ours_first(rows, places)),
        *labels(rows, places),
        *legend(tools, wrong=any(is_wrong(row) for row in rows)),
        "</svg>",
    ]
    return "\n".join(part for part in parts if part) + "\n"


def grid(across: Axis, up: Axis) -> Iterable[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    for value in across.ticks():
        x = across(value)
        yield f'<path d="M{x},{TOP}V{bottom}" stroke="{RULE}"/>'
        yield text(x, bottom + 17, f"{value:g}", anchor="middle")
    for value in up.ticks():
        y = up(value)
        yield f'<path d="M{LEFT},{y}H{right}" stroke="{RULE}"/>'
        yield text(LEFT - 7, y + 4, f"{value:g}", anchor="end")
    yield text(right, bottom + 36, "peak memory of a step, GiB", anchor="end")
    yield text(LEFT - 40, TOP - 8, "ms per step")


def frontier(rows: Iterable[Row]) -> list[Row]:
    """The rows that none of the others beats in both, by rising peak and falling time."""
    kept: list[Row] = []
    for row in sorted(rows, key=lambda row: (row["peak"], row["milliseconds"])):
        if not kept or row["milliseconds"] < kept[-1]["milliseconds"]:
            kept.append(row)
    return kept


def staircase(tool: str, rows: Sequence[Row], across: Axis, up: Axis) -> str:
    best = frontier(row for row in rows if row["tool"] == tool and not is_wrong(row))
    if len(best) < 2:
        return ""
    corners = [(across(row["peak"] / GIB), up(row["milliseconds"])) for row in best]
    path = f"M{corners[0][0]},{corners[0][1]}" + "".join(f"H{x}V{y}" for x, y in corners[1:])
    style = f'stroke="{COLOURS[tool]}" stroke-width="2" stroke-dasharray="{DASHES[tool]}"'
    return f'<path class="frontier {tool}" d="{path}" fill="none" {style}/>'


Place = tuple[float, float]


def ours_first(rows: Sequence[Row], places: Sequence[Place]) -> list[tuple[Row, Place]]:
    """In the order of drawing: no point of another tool is hidden by one of Lowtide."""
    return sorted(zip(rows, places, strict=True), key=lambda pair: pair[0]["tool"] not in OURS)


def mark(row: Row, x: float, y: float) -> str:
    title = f"<title>{escape(NAMES[row['tool']])}: {escape(point_text(row))}</title>"
    return shape(row["tool"], x, y, hollow=is_wrong(row), inside=title)


def shape(tool: str, x: float, y: float, *, hollow: bool = False, inside: str = "") -> str:
    fill, stroke = ("#ffffff", COLOURS[tool]) if hollow else (COLOURS[tool], "#ffffff")
    where = f'class="point {tool}" transform="translate({x} {y})" fill="{fill}" stroke="{stroke}"'
    return f'<path {where} d="{SHAPES[tool]}">{inside}</path>'


def is_wrong(row: Row) -> bool:
    return row.get("gradients") == "wrong"


Box = tuple[float, float, float, float]


def labels(rows: Sequence[Row], places: Sequence[Place]) -> Iterable[str]:
    """The settings, each at the first side of its point where it covers nothing."""
    taken: list[Box] = [(x - 7, y - 7, x + 7, y + 7) for x, y in places]
    for row, (x, y) in zip(rows, places, strict=True):
        wide = 6.2 * len(row["setting"])
        sides = ((x + 9, y - 7), (x - 9 - wide, y - 7), (x + 9, y + 16), (x - 9 - wide, y + 16))
        for left, base in sides if wide else ():
            box = (left, base - 10, left + wide, base + 2)
            if inside(box) and not any(overlap(box, other) for other in taken):
                taken.append(box)
                yield text(left, base, row["setting"], size=10.5, colour=COLOURS[row["tool"]])
                break


def inside(box: Box) -> bool:
    return box[0] > LEFT and box[1] > TOP - 6 and box[2] < WIDTH - RIGHT and box[3] < HEIGHT - BOTTOM


def overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def legend(tools: Sequence[str], *, wrong: bool) -> Iterable[str]:
    """Two columns below the axis."""
    for index, tool in enumerate(tools):
        x, y = LEFT + 8 + 330 * (index % 2), HEIGHT - BOTTOM + 58 + 19 * (index // 2)
        if tool in OURS:
            style = f'stroke="{COLOURS[tool]}" stroke-width="2" stroke-dasharray="{DASHES[tool]}"'
            yield f'<path d="M{x - 14},{y - 4}h28" {style}/>'
        yield shape(tool, x, y - 4)
        yield text(x + 20, y, NAMES[tool], colour=INK)
    if wrong:
        yield text(WIDTH - RIGHT, 26, "hollow: wrong gradients", anchor="end")


def text(
    x: float, y: float, label: str, *, anchor: str = "start", size: float = 12, colour: str = SOFT
) -> str:
    style = f'text-anchor="{anchor}" font-size="{size}" fill="{colour}" '
    style += 'stroke="#ffffff" stroke-width="3" paint-order="stroke"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(label)}</text>'
