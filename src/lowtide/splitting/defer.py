"""Which results of a step are left to whoever reads them, so that no chunk's rows need be put together.

A wide result of a region that gets no gradient, that nothing else of the step reads, and that is made from
one narrow value of the step and from its inputs alone is not computed by the step: see
`capture/deferred_output.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..capture.deferred_output import Deferral
from ..capture.fx_insert import call_after
from ..capture.fx_nodes import storage_of
from ..capture.trace import Trace
from .regions import Region

__all__ = ["defer_results"]

aten = torch.ops.aten

_WORTH = 2
"""The result has at least so many times the bytes of what is held in its place."""

_CASTS = ("aten.t", "aten.transpose", "aten.permute", "aten._to_copy", "prims.convert_element_type")


def defer_results(trace: Trace, region: Region) -> None:
    """Let the trace return a hollow tensor in the place of each result of the region that can wait."""
    gradients = [tuple(node.meta["val"].shape) for node in trace.expected if "val" in node.meta]
    for place, node in enumerate(trace.outputs):
        if not isinstance(node, fx.Node) or not isinstance(region.outcome.get(node), tuple):
            continue
        inside = all(user in region.outcome or user.op == "output" for user in node.users)
        if not inside or tuple(node.meta["val"].shape) in gradients or node in trace.gradients:
            continue
        if trace.outputs.count(node) > 1:
            continue
        found = _Recipe(trace, region, node)
        if found.held is not None:
            hollow = _hollow(found.held, node)
            node.replace_all_uses_with(hollow, delete_user_cb=lambda user: user.op == "output")
            trace.outputs[place] = hollow
            trace.deferred.append(found.deferral())


def _hollow(held: fx.Node, like: fx.Node) -> fx.Node:
    size = list(like.meta["val"].shape)
    return call_after(held, aten.as_strided.default, held, size, [0] * len(size))


class _Recipe:
    """What a result is made of; `held` is the one value of the step, None where it cannot wait."""

    def __init__(self, trace: Trace, region: Region, node: fx.Node) -> None:
        self.trace, self.region, self.node = trace, region, node
        self.inputs = {primal: place for place, primal in enumerate(trace.primals)}
        self.nodes: set[fx.Node] = set()
        self.reads: list[fx.Node] = []
        self.sources: list[fx.Node] = []
        self.collect(node)
        self.held = self.sources[0] if len(self.sources) == 1 and self.is_worth(self.sources[0]) else None

    def collect(self, node: fx.Node) -> None:
        if node in self.nodes or node in self.reads or node in self.sources:
            return
        if node in self.inputs:
            self.reads.append(node)
        elif node in self.region.outcome or self.is_of_weights(node):
            self.nodes.add(node)
            for parent in node.all_input_nodes:
                self.collect(parent)
        else:
            self.sources.append(node)

    def is_of_weights(self, node: fx.Node) -> bool:
        """Whether a node is an input of the step, looked at or cast."""
        if node in self.inputs:
            return True
        name = str(getattr(node.target, "overloadpacket", ""))
        return name in _CASTS and all(map(self.is_of_weights, node.all_input_nodes))

    def is_worth(self, held: fx.Node) -> bool:
        value, result = held.meta["val"], self.node.meta["val"]
        if value.dtype != result.dtype or any(node in self.trace.mutated for node in self.reads):
            return False
        shared = [primal for primal in self.inputs if isinstance(primal.meta["val"], torch.Tensor)]
        if any(storage_of(primal.meta["val"]) == storage_of(value) for primal in shared):
            return False
        return bool(result.untyped_storage().nbytes() >= _WORTH * value.untyped_storage().nbytes())

    def deferral(self) -> Deferral:
        graph = fx.Graph()
        there: dict[fx.Node, Any] = {}
        for given in [*self.sources, *self.reads]:
            there[given] = graph.placeholder(given.name)
        for node in self.trace.graph.nodes:
            if node in self.nodes:
                there[node] = graph.node_copy(node, there.__getitem__)
        graph.output(there[self.node])
        held, result = self.sources[0].meta["val"], self.node.meta["val"]
        return Deferral(
            fx.GraphModule(torch.nn.Module(), graph),
            tuple(self.inputs[node] for node in self.reads),
            tuple(result.shape),
            result.dtype,
            (tuple(held.shape), held.stride(), held.storage_offset()),
        )
