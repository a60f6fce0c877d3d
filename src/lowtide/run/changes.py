"""Lines of generated code that change something for good: it is there after the step, however that ends."""

from __future__ import annotations

from torch import fx

from ..capture.fx_nodes import is_mutation
from ..capture.rewrites.accumulate import is_accumulation
from ..capture.rewrites.batchnorm import UPDATES_STATISTICS
from ..capture.rewrites.handing import is_handing
from ..capture.rewrites.stepping import is_update

__all__ = ["CHANGES", "FILE", "Change", "change_of"]

FILE = "<lowtide "
"""How the names of generated code begin in tracebacks."""

CHANGES = "changes"
"""The global of generated code under which its changes are."""

Change = tuple[int, str, int]
"""A line, what it changes, and how many of those."""


def change_of(node: fx.Node, line: int) -> Change | None:
    """What a node changes for good, None for most."""
    if node.target in UPDATES_STATISTICS:
        return line, "statistics", 1
    if is_accumulation(node):
        return line, "summed", 1
    if is_handing(node):
        return line, "handed", len(node.args[0])  # type: ignore[arg-type]
    if is_update(node):
        return line, "updated", len(node.args[0])  # type: ignore[arg-type]
    return (line, "written", 1) if is_mutation(node) else None
