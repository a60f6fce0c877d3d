"""The pages of the documentation, and what can be checked in them without a browser."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "RELEASING.md",
    ROOT / "SECURITY.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))

FENCED = re.compile(r"^```.*?^```$", flags=re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)|^\[[^]]+\]: (\S+)$", flags=re.MULTILINE)
BLOCK = re.compile(r"(?:^<!-- not run: (.+?) -->\n)?^```python\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
PASSED_OVER = re.compile(r"^<!-- not run: .+? -->\n\n(?: {4}.*\n)+", flags=re.MULTILINE)


class Block(NamedTuple):
    """A block of Python, and why it is not run, if it is not: a comment above it says so."""

    code: str
    reason: str


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(page: Path) -> list[Block]:
    return [Block(code, reason) for reason, code in BLOCK.findall(page.read_text(encoding="utf-8"))]


def sessions(page: Path) -> str:
    """The page without sessions with >>> under a comment that says why they are not run."""
    return PASSED_OVER.sub("", page.read_text(encoding="utf-8"))


def prose(page: Path) -> str:
    """The page without its blocks of code."""
    return FENCED.sub("", page.read_text(encoding="utf-8"))


def links(page: Path) -> list[str]:
    text = re.sub(r"(?<!`)`[^`\n]+`(?!`)", "``", prose(page))
    return [inline or defined for inline, defined in LINK.findall(text)]


def anchors(page: Path) -> set[str]:
    """The anchors that headings get, by the rule that code hosts and MyST share."""
    found: list[str] = []
    for heading in re.findall(r"^#{1,6} (.+)$", prose(page), flags=re.MULTILINE):
        words = re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
        again = sum(1 for known in found if re.fullmatch(rf"{re.escape(slug)}(-\d+)?", known))
        found.append(f"{slug}-{again}" if again else slug)
    return set(found)


def commands(page: Path) -> list[str]:
    """The calls of `lowtide` in transcripts, as far as a pipe."""
    lines = re.findall(r"^    \$ lowtide (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return [line.partition(" | ")[0] for line in lines]
