"""What was tried with training tools: each test says its row, and docs/training-tools.md has the table.

python tests/tried.py

writes the table into the page.
"""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from types import FunctionType
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "training-tools.md"
FOLDERS = [ROOT / "tests" / name for name in ("integrations", "distributed")]
TOOLS = ("torch", "transformers", "accelerate", "peft", "trl", "lightning")
MARKS = ("<!-- tried: made by tests/tried.py -->\n", "<!-- /tried -->")


class Row(NamedTuple):
    """What was tried in which tool, and how the weights compare with those of the same script uncapped."""

    tool: str
    case: str
    weights: str


def tried(tool, case, weights="same bits"):
    """Say what a test tries."""

    def note(test):
        test.rows = [*getattr(test, "rows", []), Row(tool, case, weights)]
        return test

    return note


def versions() -> str:
    """The versions that are tested, from the file that pins them."""
    pinned = dict(
        re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE)
    )
    return ", ".join(f"{tool} {pinned[tool]}" for tool in TOOLS if tool in pinned)


def table() -> str:
    """The table of all rows, by tool, in the order of the tests."""
    files = sorted(path for folder in FOLDERS for path in folder.glob("test_*.py"))
    tests = [test for path in files for test in vars(importlib.import_module(path.stem)).values()]
    found = [row for test in tests if isinstance(test, FunctionType) for row in vars(test).get("rows", [])]
    head = ["| tool | tried | weights after training |", "|---|---|---|"]
    rows = sorted(dict.fromkeys(found), key=lambda row: row.tool.lower())
    lines = [f"| {row.tool} | {row.case} | {row.weights} |" for row in rows]
    return "\n".join([f"With {versions()}:", "", *head, *lines, ""])


def in_page() -> str:
    """The table that the page has."""
    return PAGE.read_text(encoding="utf-8").partition(MARKS[0])[2].partition(MARKS[1])[0]


def write() -> None:
    """Put the table into the page."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(MARKS[0])
    PAGE.write_text(before + MARKS[0] + table() + MARKS[1] + rest.partition(MARKS[1])[2], encoding="utf-8")


if __name__ == "__main__":
    sys.path += [*map(str, FOLDERS), str(ROOT / "tests")]
    write()
