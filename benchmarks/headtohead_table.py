"""The table of the head-to-head in Markdown, from its rows."""

from __future__ import annotations

from collections.abc import Iterable

from headtohead_results import MODELS, NAMES, Row, latest, mib, points, title

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
