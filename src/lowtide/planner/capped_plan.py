"""The plan under a budget of what is captured already: a graph from a file, or a step that may still run.

A share is of the uncapped peak, whatever the device has. A graph is planned without torch. Of a step the
device is known: bytes may not be more than it has, and on CUDA its allocator is replayed for every plan.
"""

from __future__ import annotations

from dataclasses import replace

from ..plans.graph import Graph
from ..plans.keep_all import keep_all
from ..plans.planned_step import Plan, make_plan
from ..solve import find_method
from ..units import Budget
from .frontiers import size_of
from .too_small import too_small

__all__ = ["plan_of_graph", "plan_of_step"]


def plan_of_graph(graph: Graph, asked: Budget, method: str, notes: tuple[str, ...] = ()) -> Plan:
    """The plan of a graph under a budget, where a share is of the uncapped peak."""
    solve = find_method(method)
    if asked.word == "min":
        return make_plan(graph, solve(graph, 0), method=method, notes=notes)
    vanilla = make_plan(graph, keep_all(graph), method="keep_all", notes=notes)
    size = size_of(asked, vanilla.peak)
    if vanilla.peak <= size:
        return replace(vanilla, budget=size)
    for room in (size, 0):
        plan = make_plan(graph, solve(graph, room), method=method, budget=size, notes=notes)
        if plan.peak <= size:
            return plan
    raise too_small(plan, asked, size)


def plan_of_step(vanilla: Plan, asked: Budget, method: str, target: str | None) -> Plan:
    """The same for a captured step, whose device is known: its allocator is replayed, its memory a limit."""
    import torch

    from .under_budget import device_blocks, device_memory, plan_graph, resolve

    graph = vanilla.graph
    device = torch.device("cpu" if target else graph.device)
    if asked.word != "min":
        memory = device_memory(device, target)
        sized = asked.share is not None
        size = size_of(asked, vanilla.peak) if sized else resolve(asked, graph, vanilla.peak, memory)
        asked = replace(asked, bytes=size, share=None, word=None)
    free = device_blocks(device, target)
    if free is None:
        return plan_of_graph(graph, asked, method, vanilla.notes)
    bare = graph.replace(fixed={name: each for name, each in graph.fixed.items() if name != "allocator"})
    return plan_graph(bare, asked, method=method, free=free, notes=vanilla.notes)
