"""Values of a captured step that take no bytes: gradients that do not come, inputs that nothing touches."""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from .._torch import frees_tangents
from ..plans.graph import Graph, Value
from .fx_nodes import tensors_of
from .trace import Trace

__all__ = ["with_tangents_that_come", "without_untouched"]


def with_tangents_that_come(graph: Graph, trace: Trace) -> Graph:
    """The graph where tangents that do not come take nothing, and some are held until the backward ends.

    `loss.backward()` itself holds the gradient of a scalar; before torch 2.13 the engine holds all of them.
    """
    every = not frees_tangents()
    come = [node for node in trace.expected if tensors_of(node)]
    held = {node.name: every or node.meta["val"].numel() == 1 for node in come}

    def known(value: Value) -> Value:
        if value.kind != "tangent":
            return value
        come = value.name in held
        return replace(
            value, bytes=value.bytes if come else 0, held=come and (held[value.name] or value.held)
        )

    return graph.replace(values=tuple(map(known, graph.values)))


def without_untouched(
    graph: Graph, trace: Trace, value_of: dict[fx.Node, str], *, also: set[fx.Node]
) -> Graph:
    """The graph where inputs that the step never touches take nothing, as in what is measured on the CPU.

    A mask that a causal hint makes needless is one, unless it is looked at before the step runs (`also`), and
    so are the weights of a head whose output is not in the loss. A GPU's allocator holds them whoever reads
    them.
    """
    results = {value_of.get(node) for node in (*trace.outputs, *trace.gradients) if isinstance(node, fx.Node)}
    touched = (
        results | {name for op in graph.ops for name in op.reads} | {value_of.get(node) for node in also}
    )

    def known(value: Value) -> Value:
        untouched = value.kind in ("parameter", "buffer", "input") and value.name not in touched
        return replace(value, bytes=0) if untouched else value

    return graph.replace(values=tuple(map(known, graph.values)))
