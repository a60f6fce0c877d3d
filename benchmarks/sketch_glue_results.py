"""The rows of the fine-tuning benchmark: how they are read, and the table made of them. No torch here.

A row is a JSON line, known by its task, its kind of sketch and its seed; the last of a kind counts.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import row_files

Row = dict[str, Any]

RESULTS = Path(__file__).parent / "results"
RATES = ("50%", "20%", "10%")
KINDS = (
    "exact",
    *(f"{kind} {rate}" for kind in ("strided", "gaussian", "rademacher") for rate in RATES),
    "int8",
    "int4",
)
PAPER = {
    "exact": 60.9,
    **dict(zip((f"gaussian {rate}" for rate in RATES), (58.6, 57.8, 56.5), strict=True)),
    **dict(zip((f"rademacher {rate}" for rate in RATES), (62.4, 59.1, 55.5), strict=True)),
}
"""Matthews correlation on CoLA in Bershatsky et al. 2022: RoBERTa-base, one seed."""
FIGURES = {
    ("cola", "matthews"): "CoLA, Matthews",
    ("rte", "accuracy"): "RTE, accuracy",
    ("sst2", "accuracy"): "SST-2, accuracy",
    ("stsb", "pearson"): "STS-B, Pearson",
    ("stsb", "spearman"): "STS-B, Spearman",
}


def key(row: Row) -> tuple[Any, ...]:
    return row["task"], row["kind"], row["seed"]


def read(path: Path) -> list[Row]:
    return list({key(row): row for row in row_files.read(path)}.values())


def table(rows: Iterable[Row]) -> str:
    """A line for each kind: the mean over seeds and the standard deviation, beside the paper's CoLA."""
    rows = list(rows)
    if not rows:
        return "No rows yet."
    shown = [figure for figure in FIGURES if any(row["task"] == figure[0] for row in rows)]
    head = ["kept of inputs", *(FIGURES[figure] for figure in shown)]
    head += ["CoLA, training loss", "noise / SGD's own", "CoLA in the paper"]
    lines = [head, ["---"] * len(head)]
    for kind in KINDS:
        mine = [row for row in rows if row["kind"] == kind]
        if mine:
            cells = [spread([row[name] for row in mine if row["task"] == task]) for task, name in shown]
            lines.append([kind, *cells, cola_loss(mine), noise(mine), paper(kind)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + f"\n\n{about(rows)}"


def about(rows: list[Row]) -> str:
    """How many seeds, on what."""
    seeds = [sum(key(row)[:2] == pair for row in rows) for pair in {key(row)[:2] for row in rows}]
    several = f"{min(seeds)}" if min(seeds) == max(seeds) else f"{min(seeds)} to {max(seeds)}"
    where = ", ".join(sorted({f"{row['device']}, torch {row['torch']}" for row in rows}))
    return f"Mean ± standard deviation of {several} seeds, times 100; {where}."


def spread(figures: list[float]) -> str:
    if not figures:
        return ""
    mean = f"{100 * statistics.mean(figures):.1f}"
    return mean if len(figures) < 2 else f"{mean} ± {100 * statistics.stdev(figures):.1f}"


def cola_loss(rows: list[Row]) -> str:
    found = [row["loss"] for row in rows if row["task"] == "cola"]
    return f"{statistics.mean(found):.3f}" if found else ""


def noise(rows: list[Row]) -> str:
    """The median over tasks of what the layers' median was at the start."""
    found = [row["noise"] for row in rows if "noise" in row]
    return f"{statistics.median(found):.2g}" if found else ""


def paper(kind: str) -> str:
    return f"{PAPER[kind]:.1f}" if kind in PAPER else ""
