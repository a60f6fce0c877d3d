"""The tables of the language-model benchmark, and whether Lowtide meets every point of the other tools.

A point of another tool is met where some row of Lowtide takes no more memory, allocated and reserved, and no
more time; two per cent count as equal. Of rows of the same setting the newest counts.
"""

from __future__ import annotations

from typing import Any

from language_models_steps import SUBJECTS

__all__ = ["newest", "table", "unmet", "verdict"]

EQUAL = 1.02
TOOLS = {
    "eager": "plain PyTorch",
    "checkpoint": "`gradient_checkpointing_enable()`",
    "compile": "torch.compile",
    "compile+checkpoint": "torch.compile and checkpointing",
    "lowtide": "Lowtide",
    "lowtide-inductor": "Lowtide, Inductor",
}
ASKED = {"split": "`split=True`", "step": "`step_in_backward=True`"}

Row = dict[str, Any]


def newest(rows: list[Row]) -> dict[str, list[Row]]:
    """By subject, one row for each setting in the order of the benchmark."""
    found = {(row["subject"], row["setting"]): row for row in rows}
    return {
        name: [found[name, setting] for setting in subject.settings if (name, setting) in found]
        for name, subject in SUBJECTS.items()
    }


def table(rows: list[Row]) -> str:
    """A table for each subject that has rows."""
    parts = [of_subject(SUBJECTS[name].title, mine) for name, mine in newest(rows).items() if mine]
    return "\n\n".join(parts)


def of_subject(title: str, rows: list[Row]) -> str:
    plain = next((row for row in rows if row["setting"] == "eager" and "error" not in row), None)
    lines = [
        f"**{title}**",
        "",
        "| tool | budget | predicted | allocated | reserved | step | against plain | set-up |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
        *(line(row, plain) for row in rows),
    ]
    return "\n".join(lines)


def line(row: Row, plain: Row | None) -> str:
    tool, budget = named(row["setting"])
    if "error" in row:
        least = f" (smallest {mib(row['smallest'])})" if "smallest" in row else ""
        return f"| {tool} | {budget} | {row['error']}{least} | | | | | |"
    times = "" if plain is None else f"{row['seconds'] / plain['seconds']:.2f} x"
    predicted = mib(row["predicted"]) if "predicted" in row else ""
    cells = [tool, budget, predicted, mib(row["allocated"]), mib(row["reserved"])]
    cells += [f"{row['seconds'] * 1e3:,.0f} ms", times, f"{row['setup_seconds']:.0f} s"]
    return f"| {' | '.join(cells)} |"


def named(setting: str) -> tuple[str, str]:
    """What a setting is called in a table: the tool with what is asked for, and the budget."""
    tool, *words = setting.split(":")
    asked = "".join(f", {ASKED[word]}" for word in words[1:])
    return TOOLS[tool] + asked, words[0] if words else ""


def mib(size: int) -> str:
    return f"{size / 2**20:,.0f}"


def verdict(rows: list[Row]) -> str:
    """Per subject, how many points of other tools are met, and the smallest of each side."""
    lines = [
        "| step | points of other tools met | smallest of the others | smallest of Lowtide |",
        "|---|---|---:|---:|",
    ]
    for name, mine in newest(rows).items():
        others, ours = sides(mine)
        if others and ours:
            met = len(others) - len(unmet(mine))
            least, own = (min(side, key=lambda row: row["allocated"]) for side in (others, ours))
            lines.append(
                f"| {SUBJECTS[name].title} | {met} of {len(others)} | {point(least)} | {point(own)} |"
            )
    return "\n".join(lines)


def point(row: Row) -> str:
    return f"{mib(row['allocated'])} MiB, {row['seconds'] * 1e3:,.0f} ms"


def sides(rows: list[Row]) -> tuple[list[Row], list[Row]]:
    """The rows of other tools and those of Lowtide, without what was refused or ran out of memory."""
    ran = [row for row in rows if "error" not in row]
    ours = [row for row in ran if row["setting"].startswith("lowtide")]
    return [row for row in ran if row not in ours], ours


def unmet(rows: list[Row]) -> list[Row]:
    """The points of other tools that no row of Lowtide meets."""
    others, ours = sides(rows)
    return [row for row in others if not any(meets(own, row) for own in ours)]


def meets(own: Row, other: Row) -> bool:
    return all(own[key] <= EQUAL * other[key] for key in ("allocated", "reserved", "seconds"))
