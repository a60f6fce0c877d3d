"""Pieces of HTML. Whatever comes from a plan goes through `say` and nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from .wording import short

__all__ = ["say", "table"]


def say(text: str, most: int = 90) -> str:
    """Text of a plan, cut to a bounded length and escaped."""
    return escape(short(text, most))


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    numbers: frozenset[int],
    name: str,
    total: Sequence[str] = (),
) -> str:
    """A table of cells that are escaped already; `numbers` are the columns set to the right."""

    def line(cells: Sequence[str], tag: str = "td") -> str:
        marks = (' class="number"' if index in numbers else "" for index in range(len(cells)))
        scope = ' scope="col"' if tag == "th" else ""
        found = zip(marks, cells, strict=True)
        return "<tr>" + "".join(f"<{tag}{scope}{mark}>{cell}</{tag}>" for mark, cell in found) + "</tr>\n"

    foot = f"<tfoot>{line(total)}</tfoot>" if total else ""
    body = "".join(map(line, rows))
    return (
        f'<div class="scroll"><table id="{name}">\n<thead>{line(head, "th")}</thead>\n'
        f"<tbody>{body}</tbody>{foot}</table></div>"
    )
