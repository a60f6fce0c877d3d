"""The examples as pages of the site: what the script says of itself, and its text."""

from __future__ import annotations

import ast

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.parsers import Parser


class Script(Parser):
    """A page of a Python script."""

    supported = ("script",)

    def parse(self, inputstring: str, document: nodes.document) -> None:
        """Fill the document; called by Sphinx."""
        said, _, _ = (ast.get_docstring(ast.parse(inputstring)) or "").partition("\n")
        name = document["source"].rpartition("/")[2]
        code = nodes.literal_block(inputstring, inputstring, language="python")
        page = nodes.section("", nodes.title(name, name), nodes.paragraph(said, said), code, ids=["script"])
        document += page


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_source_suffix(".py", "script")
    app.add_source_parser(Script)
    return {"parallel_read_safe": True}
