"""The phases of a region: what must be done for all rows before the first row can go on.

Nodes of a region that depend on one another by way of something outside, or of a finished sum (the backward
of a mean loss needs the weights of all rows), are in different phases. So are its forward and its backward.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from ..capture.fx_nodes import is_item
from ..capture.trace import Trace
from .regions import Region

__all__ = ["nodes_around", "phases_of"]


def nodes_around(trace: Trace, region: Region) -> list[fx.Node]:
    """The nodes from the first one of a region to its last one."""
    nodes = list(trace.graph.nodes)
    places = [place for place, node in enumerate(nodes) if node in region.outcome]
    return nodes[places[0] : places[-1] + 1]


def phases_of(nodes: Sequence[fx.Node], region: Region, late: set[fx.Node]) -> dict[fx.Node, int]:
    """The phase of each node of a region; `nodes` are those around it, `late` those of the backward."""
    early = _levels(nodes, region, late, 0)
    forward = [level for node, level in early.items() if node not in late]
    return _levels(nodes, region, late, max(forward, default=-1) + 1)


def _levels(
    nodes: Sequence[fx.Node], region: Region, late: set[fx.Node], backward: int
) -> dict[fx.Node, int]:
    """How often each node of the region must wait for all rows; those of the backward at least so often."""
    level: dict[fx.Node, int] = {}
    outside: dict[fx.Node, int] = {}
    for node in nodes:
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
