"""The tables of docs/models.md, from the rows of benchmarks/models.py and models_in_pieces.py."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

__all__ = ["in_pieces", "summary", "table"]

HEAD = (
    "| model | captured | same bits | predicted = measured | first step, CPU seconds |\n|---|---|---|---|---|"
)
CAUSES = (
    (r"expert_hit", "a loop over the experts that were hit"),
    (r"split_with_sizes", "the routing decides how rows are split"),
    (r"skip_the_layer", "attention draws in a way that cannot be foretold before a layer is left out"),
    (r"inspect\.py", "its loss matches boxes on the host"),
    (r"top_k_delays", "Python reads delays that activations choose"),
    (r"torch\.nn\.Parameter|nn\.Linear\(config", "a call makes layers anew"),
    (r"pos_encoding", "it replaces a tensor that it holds"),
    (r"padding_mask\.any", "it writes to the batch before it asks about it"),
    (r"data-dependent", "a branch on what it computes"),
    (r"depends on the data", "a size depends on what it computes"),
)
"""What the line at which torch stopped, or the error, has, and the cause in words."""

OTHER_BITS = "to rounding, by the capture"


def _cause(said: str) -> str:
    return next((text for sign, text in CAUSES if re.search(sign, said)), "torch cannot capture it")


def _line(row: dict[str, Any]) -> str:
    if not row["captured"]:
        return f"| {row['model']} | no: {_cause(row['said'])} | | | |"
    bits = "yes" if row["bitwise"] else OTHER_BITS if row["cap_changed_nothing"] else "NO"
    gap = row["measured"] - row["predicted"]
    peak = "yes" if gap == 0 else f"{gap / row['predicted']:+.1%}"
    return f"| {row['model']} | yes | {bits} | {peak} | {row['seconds']:.1f} |"


def table(rows: Iterable[dict[str, Any]], library: str) -> str:
    """The models of a library by name."""
    mine = [row for row in rows if row["library"] == library]
    versions = " and ".join(sorted({f"{library} {row['version']}" for row in mine}))
    return "\n".join([f"With {versions}:", "", HEAD, *map(_line, mine)])


def summary(rows: Iterable[dict[str, Any]]) -> str:
    """How many of each library train under a cap, and how exactly."""
    every = list(rows)
    lines = ["| library | models | captured | same bits | predicted = measured |", "|---|---|---|---|---|"]
    for library in [*dict.fromkeys(row["library"] for row in every), None]:
        mine = [row for row in every if library in (None, row["library"])]
        taken = [row for row in mine if row["captured"]]
        exact = sum(row["bitwise"] for row in taken)
        told = sum(row["predicted"] == row["measured"] for row in taken)
        share = f"{len(taken)} ({len(taken) / len(mine):.0%})"
        lines.append(f"| {library or 'all'} | {len(mine)} | {share} | {exact} | {told} |")
    return "\n".join(lines)


def in_pieces(rows: Iterable[dict[str, Any]]) -> str:
    """Models whose step is not one graph, in pieces."""
    lines = [
        "| model | pieces | outside of them | takes at most | the cap changes no bit | as predicted |",
        "|---|---|---|---|---|---|",
    ]
    for each in rows:
        gap = each["measured"] - each["predicted"]
        peak = "yes" if gap == 0 else f"{gap / each['predicted']:+.2%}"
        share = f"{each['between'] / each['uncapped']:.1%} of the uncapped peak"
        same = "yes" if each["cap_changed_nothing"] else "NO"
        outside = _outside(each["outside"])
        lines.append(f"| {each['model']} | {each['pieces']} | {outside} | {share} | {same} | {peak} |")
    return "\n".join(lines)


def _outside(places: list[str]) -> str:
    """The lines of the model at which pieces end; the library's own are said by the cause."""
    lines = [place for place in places if re.fullmatch(r"\w+\.py:\d+", place)]
    named = [_OWN.get(line.partition(":")[0], f"`{line}`") for line in lines]
    return ", ".join(dict.fromkeys(named)) or "what hooks and wrappers of the library do"


_OWN = {"inspect.py": "matching of boxes, by SciPy"}
"""Where torch stops in a module of Python's own, and what the model does there."""
