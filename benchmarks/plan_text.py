"""The results of `plans.py` for the terminal: a table per graph, and a summary."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator

from plan_results import SHARES, Loss, Row, Share, comparisons, gap, losses

__all__ = ["summary_text", "table_text"]

HEAD = f"{'method':24}{'floor, GB':>10}{'share':>8}{'extra':>9}"
HEAD += "".join(f"{f'{share} %':>9}" for share in SHARES) + f"{'seconds':>9}"


def loss_text(loss: Loss) -> str:
    where = "smallest peak" if loss.at == "floor" else f"{loss.at} %"
    return f"{loss.graph}, {where}: auto {fine(loss.auto)}, {loss.method} {fine(loss.other)}"


def fine(share: Share) -> str:
    """A share with more digits than the tables have, since losses may be small."""
    return f"{share:.3%}" if isinstance(share, float) else "-"


def percent(extra: Share) -> str:
    return "-" if extra is None else extra if isinstance(extra, str) else f"{extra:+.1%}"


def cell(row: Row, share: int) -> str:
    """The extra time of a row at a budget; "over" where the time ran out before."""
    missing = "over" if row.over is not None else "-"
    return percent(row.extra[str(share)]) if str(share) in row.extra else missing


def table_text(rows: list[Row]) -> str:
    """The table of one graph."""
    first = rows[0]
    title = f"{first.graph}: {first.ops} ops, vanilla peak {first.vanilla / 1e9:.2f} GB"
    return "\n".join([title, HEAD, *map(line, rows), *gap_lines(rows)])


def line(row: Row) -> str:
    if row.floor is None:
        floor = f"{'':27}"
    else:
        floor = f"{row.floor / 1e9:10.2f}{row.floor / row.vanilla:8.1%}{percent(row.floor_extra):>9}"
    seconds = "" if row.seconds is None else f"{row.seconds:.2f}"
    cells = "".join(f"{cell(row, share):>9}" for share in SHARES)
    note = f"over {row.over} s" if row.over is not None else row.reason
    return f"{row.method:24}{floor}{cells}{seconds:>9}  {note}".rstrip()


def gap_lines(rows: Iterable[Row]) -> Iterator[str]:
    for row in rows:
        if row.method == "auto" and row.bound:
            gaps = (gap(row, share) for share in SHARES)
            cells = "".join(f"{'-' if found is None else f'{found:.1%}':>9}" for found in gaps)
            yield f"{'gap of auto':24}{'':27}{cells}"


def summary_text(rows: list[Row]) -> str:
    """Where `auto` loses, and how far it is from the bound."""
    behind = list(losses(rows))
    lines = [f"auto loses {len(behind)} of {comparisons(rows)} comparisons"]
    lines += [f"  {loss_text(loss)}" for loss in behind]
    autos = [row for row in rows if row.method == "auto"]
    for share in SHARES:
        gaps = [found for row in autos if (found := gap(row, share)) is not None]
        if gaps:
            middle, most, count = statistics.median(gaps), max(gaps), len(gaps)
            lines.append(f"gap of auto at {share} %: median {middle:.2%}, most {most:.2%}, {count} graphs")
    return "\n".join(lines)
