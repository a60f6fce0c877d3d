"""The rows of the memory benchmark of sketches: which there are, and their tables. No torch here.

A row is a JSON line, known by its group (case, dtype, attention, way of running) and what was done in it: the
sketch, if any, and the cap, if any. The last of a kind counts. A row has a `peak` and `milliseconds`; or it
was `refused` (no plan fits); or it has an `error` in words.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import row_files

Row = dict[str, Any]

RESULTS = Path(__file__).parent / "results"
CASES = {
    "mrpc": "128 x 128 tokens (MRPC)",
    "qnli": "16 x 512 tokens (QNLI)",
    "sst2": "256 x 64 tokens (SST-2)",
}
SKETCHES = ("strided 50%", "strided 20%", "strided 10%", "int8", "int4")
PAPER = {
    "mrpc": {"strided 50%": "6 %", "strided 20%": "19 %", "strided 10%": "23 %"},
    "qnli": {"strided 50%": "4 %", "strided 20%": "11 %", "strided 10%": "14 %"},
    "sst2": {"strided 50%": "6 %", "strided 20%": "21 %", "strided 10%": "26 %"},
}
"""What Bershatsky et al. 2022 saved of the peak of RoBERTa-base at these rates, in single precision."""
RUN = {"eager": "eager", "compiled": "compiled", "graph": "as one CUDA graph"}
"""The ways of running, in words."""
LOWER = "80%"
"""The budget of a sketch and a cap together, of the peak of the sketch alone."""


class Group(NamedTuple):
    """What a process measures: one batch on one model, and how it is run."""

    case: str
    dtype: str
    attention: str
    how: str


class Way(NamedTuple):
    """A sketch by its name; a cap "as" another sketch, at the peak that it reached, or a share of its own."""

    sketch: str = "none"
    cap: str = ""

    @property
    def budget_of(self) -> Way:
        """The way whose peak the budget is taken of."""
        return Way(self.cap.removeprefix("as ") if self.cap.startswith("as ") else self.sketch)

    @property
    def about(self) -> str:
        """The sketch that it belongs to."""
        return self.budget_of.sketch

    @property
    def share(self) -> float:
        return 1.0 if self.cap.startswith("as ") else int(self.cap.rstrip("%")) / 100


def groups() -> list[Group]:
    """Compiled ones first, as they take longest; last those with the paper's attention."""
    usual = [
        Group(case, dtype, "sdpa", how)
        for how in ("compiled", "eager")
        for dtype in ("float32", "bfloat16")
        for case in CASES
    ]
    last = (("bfloat16", "sdpa", "graph"), ("float32", "eager", "eager"))
    return [*usual, *(Group(case, *others) for others in last for case in CASES)]


def ways(group: Group) -> list[Way]:
    """The rows of a group, those that matter most first; a cap comes after the row that its budget is of.

    A compiled cap takes a minute or more to make: there are fewer of them.
    """
    first = [Way(), Way("strided 10%")]
    sketches = [Way("int4"), Way("strided 20%"), Way("strided 50%"), Way("int8")]
    if group.attention == "eager" or group.how == "graph":
        return [*first, *sketches]
    capped = [Way(cap="as strided 10%"), Way("strided 10%", LOWER)]
    if group.how == "eager":
        caps = [Way(cap=f"as {way.sketch}") for way in sketches]
        return [*first, *sketches, *capped, *caps, Way("int4", LOWER)]
    return [*first, *capped, *sketches, Way(cap="as int4")]


def key(row: Row) -> tuple[Group, Way]:
    return Group(row["case"], row["dtype"], row["attention"], row["how"]), Way(row["sketch"], row["cap"])


def read(path: Path) -> dict[tuple[Group, Way], Row]:
    return {key(row): row for row in row_files.read(path)}


def tables(rows: Iterable[Row]) -> str:
    """A table for each dtype and way of running."""
    known = {key(row): row for row in rows}
    kinds = dict.fromkeys((group.dtype, group.how) for group, _ in known)
    order = [(dtype, how) for how in RUN for dtype in ("float32", "bfloat16")]
    parts = [
        (graph_table if how == "graph" else table)(known, dtype, how)
        for dtype, how in order
        if (dtype, how) in kinds
    ]
    return "\n\n".join(part for part in parts if part) or "No rows yet."


def table(known: dict[tuple[Group, Way], Row], dtype: str, how: str) -> str:
    head = ["step", "kept of inputs", "peak, GiB", "saved"]
    paper = (dtype, how) == ("float32", "eager")
    head += ["saved with the paper's attention", "in the paper"] if paper else []
    head += [
        "time",
        "kernels alone",
        "exact, recomputed to that peak: time",
        f"both, at {LOWER} of that peak: time",
    ]
    lines = [head, ["---", "---", *["---:"] * (len(head) - 2)]]
    for case in CASES:
        group = Group(case, dtype, "sdpa", how)
        for sketch in ("none", *SKETCHES):
            if (group, Way(sketch)) in known:
                lines.append(line(known, group, sketch, paper=paper))
    return title(known, dtype, how) + "\n\n" + shown(filled(lines)) if len(lines) > 2 else ""


def title(known: dict[tuple[Group, Way], Row], dtype: str, how: str) -> str:
    first = next(row for (group, _), row in known.items() if (group.dtype, group.how) == (dtype, how))
    sizes = ", a tiny version" if first.get("tiny") else ""
    return f"**{dtype}, {RUN[how]}** ({first['device']}, torch {first['torch']}{sizes})"


def shown(lines: Iterable[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def graph_table(known: dict[tuple[Group, Way], Row], dtype: str, how: str) -> str:
    """Times alone, of the plain step that is one graph as well."""
    lines = [["step", "plain, ms", *SKETCHES], ["---", *["---:"] * (1 + len(SKETCHES))]]
    for case in CASES:
        times = [
            known.get((Group(case, dtype, "sdpa", how), Way(name)), {}).get("milliseconds")
            for name in ("none", *SKETCHES)
        ]
        if times[0]:
            ratios = [f"{time / times[0]:.2f}" if time else "" for time in times[1:]]
            lines.append([CASES[case], f"{times[0]:.1f}", *ratios])
    return title(known, dtype, how) + "\n\n" + shown(lines)


def filled(lines: list[list[str]]) -> list[list[str]]:
    """A table without the columns that have nothing below their head."""
    columns = [column for column in zip(*lines, strict=True) if any(column[2:])]
    return [list(line) for line in zip(*columns, strict=True)]


def line(known: dict[tuple[Group, Way], Row], group: Group, sketch: str, *, paper: bool) -> list[str]:
    row = known[group, Way(sketch)]
    if "peak" not in row:
        return [CASES[group.case], sketch, row.get("error", ""), *[""] * (7 if paper else 5)]
    cells = [CASES[group.case], sketch, f"{row['peak'] / 2**30:.2f}", saved(known, group, sketch)]
    if paper:
        old = group._replace(attention="eager")
        cells += [saved(known, old, sketch), PAPER[group.case].get(sketch, "")]
    cells += [time(row), time(row, "kernel_milliseconds") if group.dtype == "bfloat16" else ""]
    exact, both = (known.get((group, way)) for way in (Way(cap=f"as {sketch}"), Way(sketch, LOWER)))
    return [*cells, time(exact), time(both)]


def saved(known: dict[tuple[Group, Way], Row], group: Group, sketch: str) -> str:
    """The share of the peak without a sketch, run in the same way."""
    base, row = (known.get((group, Way(name)), {}).get("peak") for name in ("none", sketch))
    return f"{1 - row / base:.1%}".replace("%", " %") if base and row and sketch != "none" else ""


def time(row: Row | None, name: str = "milliseconds") -> str:
    """A time of a step, of that of the plain model in the same run."""
    if row is None:
        return ""
    if "milliseconds" not in row:
        return "does not fit" if row.get("refused") else "failed"
    return f"{row[name] / row[f'plain_{name}']:.2f}" if row.get(name) else ""
