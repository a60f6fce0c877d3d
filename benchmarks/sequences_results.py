"""The rows of the sequence benchmark: how they are read, and the tables made of them. No torch here.

A row is a JSON line, known by what it measures, its sizes, its tool and its setting; the last of a kind
counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import row_files

Row = dict[str, Any]

RESULTS = Path(__file__).parent / "results"
NAMES = {
    "loop": "plain loop over `nn.LSTMCell`",
    "checkpoint": "`torch.utils.checkpoint`, chunks of sqrt(T)",
    "nn.LSTM": "`nn.LSTM`",
    "scan": "`lowtide.scan`",
    "steps": "`lowtide.scan(graphs=False)`",
    "recurrent": "`lowtide.Recurrent(nn.LSTM)`",
    "blocks": "`lowtide.Recurrent(nn.LSTM, graphs=False)`",
}


def key(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("what", "hidden", "batch", "steps", "tool", "setting"))


def read(path: Path) -> list[Row]:
    return list({key(row): row for row in row_files.read(path)}.values())


def table(rows: Iterable[Row]) -> str:
    """The race, a table for each size of the hidden state."""
    races = [row for row in rows if row["what"] == "race"]
    sizes = sorted({(row["device"], row["hidden"]) for row in races})
    return "\n\n".join(
        one_table([row for row in races if (row["device"], row["hidden"]) == size]) for size in sizes
    )


def one_table(rows: list[Row]) -> str:
    loop = next(row for row in rows if row["tool"] == "loop")
    about = f"hidden {loop['hidden']}, batch {loop['batch']}, {loop['steps']} steps, {loop['device']}"
    lines = [f"| {about} | held | of the loop's | time, of the loop's | gradients |", "|---|---|---|---|---|"]
    return "\n".join(lines + [line(row, loop) for row in rows])


def line(row: Row, loop: Row) -> str:
    name = NAMES[row["tool"]]
    if row["tool"] in ("scan", "steps", "recurrent", "blocks"):
        name += f" at {row['setting']}"
    if "error" in row:
        return f"| {name} | does not fit | | | |"
    held, share = f"{row['held'] / 2**20:.1f} MiB", f"{row['held'] / loop['held']:.1%}"
    return f"| {name} | {held} | {share} | {row['seconds'] / loop['seconds']:.2f} | {same(row)} |"


def same(row: Row) -> str:
    return "bitwise the loop's" if row["distance"] == 0 else f"to {row['distance']:.0e}"
