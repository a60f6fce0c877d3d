"""The navigation of the site: the groups of links under "Documentation" in README.md.

There they are a list that a code host shows; for Sphinx each group becomes a hidden toctree with a caption.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from sphinx.application import Sphinx

HEADING = "\n## Documentation\n"


class Group(NamedTuple):
    """A caption and its pages, as (title, path) pairs."""

    caption: str
    pages: list[tuple[str, str]]


def groups(readme: str) -> list[Group]:
    """The groups of a README, in its order."""
    listed = readme.partition(HEADING)[2].partition("\n## ")[0]
    found = re.findall(r"^- \*\*(.+?)\*\*: (.+?)(?=^- \*\*|^$)", listed, flags=re.DOTALL | re.MULTILINE)
    return [Group(caption, re.findall(r"\[([^]]+)\]\(([^)#]+)\)", links)) for caption, links in found]


def toctree(group: Group) -> str:
    """The directive that puts a group into the sidebar."""
    lines = [f"{title} <{path}>" for title, path in group.pages]
    return "\n".join(["```{toctree}", ":hidden:", f":caption: {group.caption}", "", *lines, "```"])


def _append(app: Sphinx, docname: str, source: list[str]) -> None:
    if docname == app.config.root_doc:
        source[0] += "\n\n" + "\n\n".join(map(toctree, groups(source[0])))


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("source-read", _append)
    return {"parallel_read_safe": True}
