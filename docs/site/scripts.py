"""The examples as pages of the site, so that a link to a script is a page to read and not a download."""

from __future__ import annotations

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.parsers import Parser


class Script(Parser):
    """A page of a Python script."""

    supported = ("script",)

    def parse(self, inputstring: str, document: nodes.document) -> None:
        """Fill the document; called by Sphinx."""
        name = document["source"].rpartition("/")[2]
        code = nodes.literal_block(inputstring, inputstring, language="python")
        document += nodes.section("", nodes.title(name, name), code, ids=["script"])


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_source_suffix(".py", "script")
    app.add_source_parser(Script)
    return {"parallel_read_safe": True}
