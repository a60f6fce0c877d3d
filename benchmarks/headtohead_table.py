"""The tables of the head-to-head in Markdown, from its rows."""

from __future__ import annotations

from collections.abc import Iterable

from headtohead_results import (
    MODELS,
    NAMES,
    OURS,
    VANILLA_SHARE,
    counts,
    dominated,
    latest,
    mib,
    points,
    ratios,
    title,
)
from row_files import Row

COLUMNS = ("tool", "setting", "budget, MiB", "predicted peak, MiB", "peak, MiB", "reserved, MiB", "step, ms")
HEAD = f"| {' | '.join(COLUMNS)} | set-up, s | gradients |\n|---|---|{6 * '---:|'}---|"


def table(rows: Iterable[Row]) -> str:
    """A table for each model, in Markdown; percentages are against plain PyTorch."""
    rows = latest(rows)
    parts = []
    for model in MODELS:
        mine = [row for row in rows if row["model"] == model]
        base = next((row for row in points(mine) if row["tool"] == "eager"), None)
        if mine:
            parts.append("\n".join([f"**{title(model, mine)}**\n", HEAD, *(line(row, base) for row in mine)]))
    return "\n\n".join(parts)


def line(row: Row, base: Row | None) -> str:
    cells = [NAMES[row["tool"]], row["setting"], size(row, "budget"), size(row, "predicted_peak")]
    if "milliseconds" not in row:
        refused = f"refused: the smallest peak is {mib(row['smallest'])}" if "smallest" in row else ""
        return f"| {' | '.join([*cells, refused or 'error: ' + row['error'], '', '', '', ''])} |"
    over = " (over its budget)" if row["peak"] > (row.get("budget") or row["peak"]) else ""
    cells += [f"{mib(row['peak'])}{over}{against(row, base, 'peak')}", size(row, "reserved")]
    cells += [f"{row['milliseconds']:.1f}{against(row, base, 'milliseconds')}", f"{row['setup_seconds']:.1f}"]
    return f"| {' | '.join([*cells, gradients(row)])} |"


def size(row: Row, name: str) -> str:
    return mib(row[name]) if row.get(name) is not None else ""


def against(row: Row, base: Row | None, name: str) -> str:
    return "" if base is None or row is base else f" ({row[name] / base[name] - 1:+.1%})"


def gradients(row: Row) -> str:
    buffers = ", other buffers" if row.get("buffers") == "wrong" else ""
    difference = row.get("gradient_difference")
    return row["gradients"] + ("" if difference is None else f" ({difference:.1g})") + buffers


def verdict_table(rows: Iterable[Row]) -> str:
    """A line for each model: how many points of the others are met, how small and fast Lowtide gets."""
    rows = latest(rows)
    share = f"fastest within {VANILLA_SHARE:.0%} of PyTorch's peak"
    head = f"| step | points of other tools met | smallest of the others | smallest of Lowtide | {share} |"
    lines = [head, "|---|---|---|---|---|"]
    for model in MODELS:
        mine = [row for row in rows if row["model"] == model]
        lines += [verdict_line(model, mine)] if any(counts(row) for row in points(mine)) else []
    return "\n".join([*lines, "", *unmet(rows)])


def verdict_line(model: str, rows: list[Row]) -> str:
    found = dominated(rows)
    base = next(row for row in rows if row["tool"] == "eager")
    mine = [row for row in points(rows) if counts(row)]
    least, others = (
        min(side, key=lambda row: row["peak"])
        for side in (mine, [row for row in points(rows) if row["tool"] not in OURS])
    )
    small = [row for row in mine if row["peak"] <= VANILLA_SHARE * base["peak"]]
    fast = min(small, key=lambda row: row["milliseconds"], default=None)
    met = f"{sum(verdict.met for verdict in found)} of {len(found)}"
    cells = [title(model, rows), met, spot(others), spot(least), f"{ratios(fast, base)}" if fast else "none"]
    return f"| {' | '.join(cells)} |"


def spot(row: Row) -> str:
    return f"{mib(row['peak'])} MiB, {row['milliseconds']:.1f} ms"


def unmet(rows: Iterable[Row]) -> list[str]:
    """The points of other tools that Lowtide does not meet, with what comes nearest."""
    missed = [verdict for verdict in dominated(rows) if not verdict.met]
    return [f"- {MODELS[verdict.theirs['model']].split(',')[0]}: {verdict}" for verdict in missed] or [
        "Every point of the other tools is met."
    ]
