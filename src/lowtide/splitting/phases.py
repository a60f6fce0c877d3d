"""The phases of a region: what must be done for all rows before the first row can go on.

Nodes of a region that depend on one another by way of something outside, or of a finished sum (the backward
of a mean loss needs the weights of all rows), are in different phases. So are its forward and its backward.
"""

from __future__ import annotations

from torch import fx

from ..capture.fx_nodes import is_item
from ..capture.trace import Trace
from .regions import Region

__all__ = ["phases_of"]


def phases_of(trace: Trace, region: Region, late: set[fx.Node]) -> dict[fx.Node, int]:
    """The phase of each node of a region; `late` are the nodes of the backward."""
    early = _levels(trace, region, late, 0)
    forward = [level for node, level in early.items() if node not in late]
    return _levels(trace, region, late, max(forward, default=-1) + 1)


def _levels(trace: Trace, region: Region, late: set[fx.Node], backward: int) -> dict[fx.Node, int]:
    """How often each node of the region must wait for all rows; those of the backward at least so often."""
    level: dict[fx.Node, int] = {}
    outside: dict[fx.Node, int] = {}
    for node in trace.graph.nodes:
        needs = [
            outside.get(parent, 0)
            if parent not in region.outcome
            else level[parent] + (not _reads_by_rows(region, node, parent))
            for parent in node.all_input_nodes
        ]
        if node in region.outcome:
            level[node] = max([*needs, backward if node in late else 0])
        else:
            outside[node] = max(needs, default=0)
    return level


def _reads_by_rows(region: Region, node: fx.Node, parent: fx.Node) -> bool:
    if node not in region.outcome:
        return False
    return is_item(node) or parent in region.parts[node].rows
