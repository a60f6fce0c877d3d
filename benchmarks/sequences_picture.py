"""The figure of sequences: runs per step and time against memory for the three strategies, an SVG file.

Points are counted and measured; lines are the theory (the recurrences of Gruslys et al. 2016, closed forms).
Memory is a share of what keeping every step holds, on a logarithmic axis.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from math import log10
from typing import Any

from drawing import DARK

Row = dict[str, Any]

WIDTH, HEIGHT, PANEL = 780, 420, 320
LEFT, TOP, BOTTOM = 54, 56, 330
INK, SOFT, RULE = "#17212b", "#5b6875", "#dfe5ea"
COLOURS = {"hidden": "#8463c4", "internal": "#2a9d8f", "mixed": "#123f8c"}
NAMES = {
    "hidden": "hidden states",
    "internal": "internal states",
    "mixed": "mixed, in bytes",
}
TICKS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
MOST = 8.0


def picture(rows: Sequence[Row]) -> str:
    """Two panels: runs per step, and time of the whole step against the loop's."""
    mine = [row for row in rows if row["what"] == "strategy" and "held" in row]
    title = f"An LSTM over {mine[0]['steps']} steps: what memory costs"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(title)}" font-family="system-ui,sans-serif" font-size="12" fill="{SOFT}">',
        DARK,
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="24" font-size="15" font-weight="600" fill="{INK}">{escape(title)}</text>',
        *panel(mine, 0, "runs of the cell per step", lambda row: row["runs"] / row["steps"]),
        *panel(mine, 1, "time of a step / plain loop", lambda row: row["seconds"] / row["loop_seconds"]),
        *legend(),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def panel(rows: Sequence[Row], number: int, name: str, value: Any) -> Iterable[str]:
    left = LEFT + number * (PANEL + 46)
    yield f'<text x="{left}" y="{TOP - 10}" fill="{INK}">{escape(name)}</text>'
    for tick in TICKS:
        x = across(tick, left)
        yield f'<path d="M{x},{TOP}V{BOTTOM}" stroke="{RULE}"/>'
        yield f'<text x="{x}" y="{BOTTOM + 17}" text-anchor="middle">{tick:.1%}</text>'.replace(".0%", "%")
    for tick in range(1, int(MOST) + 1):
        y = up(tick)
        yield f'<path d="M{left},{y}H{left + PANEL}" stroke="{RULE}"/>'
        yield f'<text x="{left - 7}" y="{y + 4}" text-anchor="end">{tick}</text>'
    yield f'<text x="{left + PANEL}" y="{BOTTOM + 36}" text-anchor="end">held, of keeping every step</text>'
    for strategy, colour in COLOURS.items():
        points = [row for row in rows if row["tool"] == strategy and value(row) <= MOST]
        if number == 0:
            line = "L".join(f"{across(share(row), left)},{up(theory(row))}" for row in points)
            yield f'<path d="M{line}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
        for row in points:
            text = f"{NAMES[strategy]}: {share(row):.1%} of the memory, {value(row):.2f}"
            place = f'cx="{across(share(row), left)}" cy="{up(value(row))}" r="4"'
            yield f'<circle {place} fill="{colour}"><title>{escape(text)}</title></circle>'


def share(row: Row) -> float:
    return float(row["held"] / row["loop_held"])


def theory(row: Row) -> float:
    return float((row["theory"] or row["planned_runs"]) / row["steps"])


def across(value: float, left: int) -> float:
    low, high = log10(TICKS[0]), log10(TICKS[-1])
    return round(left + PANEL * (log10(max(value, TICKS[0])) - low) / (high - low), 1)


def up(value: float) -> float:
    return round(BOTTOM - (BOTTOM - TOP) * value / MOST, 1)


def legend() -> Iterable[str]:
    x = LEFT
    for strategy, colour in COLOURS.items():
        yield f'<circle cx="{x}" cy="{HEIGHT - 22}" r="4" fill="{colour}"/>'
        yield f'<text x="{x + 9}" y="{HEIGHT - 18}">{NAMES[strategy]}</text>'
        x += 40 + 7 * len(NAMES[strategy])
