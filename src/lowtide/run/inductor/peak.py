"""The peak of a compiled step and the requests that it makes, from what the texts of its two graphs hold.

The forward starts beside what is there: parameters, inputs, whatever else is on the device. The backward
starts beside what the forward left and the tangents, and frees what was saved as it goes. What a library
function takes for itself while it runs is not in the text: it is known from the prices of the ops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import fx

from ...capture.fx_nodes import tensors_of
from ...capture.lift import Lifted
from ...capture.op_classes import type_of
from ...devices.allocator import rounded
from ...plans.events import Allocate, Boundary, Event, Free, Ran
from ...plans.graph import Graph
from ...prices.measured import Workspaces, is_convolution
from ..generated_code.footprint import Footprint, footprint
from ..generated_code.ledger import Entry, Handed
from ..generated_code.moment import Moment, shapes_of

__all__ = ["CompiledStep", "read_step", "step_events", "step_peak"]

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class CompiledStep:
    """What the two texts of a step do with memory; `saved` are the inputs of the backward, tangents last."""

    graph: Graph
    forward: Footprint
    backward: Footprint
    saved: Sequence[int | Handed]
    tangents: Sequence[_Tangent]
    workspace: _Workspace


def read_step(
    lifted: Lifted,
    forward: str,
    backward: str,
    *,
    outputs: int,
    tangents: Iterable[fx.Node],
    expected: Iterable[fx.Node],
    device: torch.device,
) -> CompiledStep:
    """A step by its texts, not by its plan: Inductor may fuse and copy otherwise than was planned.

    `outputs` counts the user's own results of the forward; of the tangents, only the expected ones come.
    """

    def as_allocated(size: int) -> int:
        return rounded(size, device)

    first = footprint(forward, rounded=as_allocated, device=device.type)
    coming = [
        _Tangent.of(node, lifted, as_allocated) if node in expected else _Tangent(0, 0) for node in tangents
    ]
    inputs = [*_saved(first, outputs), *(tangent.freed for tangent in coming)]
    second = footprint(backward, inputs=inputs, rounded=as_allocated, device=device.type)
    return CompiledStep(lifted.graph, first, second, inputs, coming, _Workspace(lifted, device))


def step_peak(step: CompiledStep) -> int:
    """The bytes that a step has on the device at most."""
    start = step.graph.fixed_bytes + step.graph.given_bytes
    after = start + step.forward.left + sum(tangent.bytes for tangent in step.tangents)
    return max(
        start + _peak(step.forward, step.workspace),
        after + step.graph.boundary,
        after + _peak(step.backward, step.workspace),
    )


def step_events(step: CompiledStep) -> Iterator[Event]:
    """What a step asks of the allocator, in order, as the simulator tells it of a schedule."""
    yield from _requests(step.forward.entries, "forward {}".format, step.workspace)
    first = len(step.saved) - len(step.tangents)
    for place, tangent in enumerate(step.tangents, first):
        yield Allocate(f"input {place}", tangent.bytes, 0)
    yield Boundary(step.graph.boundary, 0)
    names = {
        place: f"forward {item.storage}" if isinstance(item, Handed) else f"input {place}"
        for place, item in enumerate(step.saved)
    }
    yield from _requests(
        step.backward.entries, lambda storage: names.get(storage, f"backward {storage}"), step.workspace
    )


def _requests(entries: Iterable[Entry], name: Callable[[int], str], workspace: _Workspace) -> Iterator[Event]:
    """The requests of one of the graphs; its storages have names of their own."""
    for entry in entries:
        if isinstance(entry, Moment):
            yield Ran(entry.call, workspace.at(entry), 0)
        elif entry.bytes:
            yield Allocate(name(entry.storage), entry.bytes, 0)
        else:
            yield Free(name(entry.storage), 0, 0)


class _Tangent(NamedTuple):
    """The gradient of an output: its bytes, and how many of them the backward can free."""

    bytes: int
    freed: int

    @classmethod
    def of(cls, node: fx.Node, lifted: Lifted, as_allocated: Callable[[int], int]) -> _Tangent:
        tensor = node.meta["val"]
        size = as_allocated(tensor.numel() * tensor.element_size())
        return cls(size, size if lifted.graph.value[lifted.value_of[node]].droppable else 0)


def _saved(forward: Footprint, outputs: int) -> list[int | Handed]:
    """What the forward hands to the backward: nothing is freed of what the caller holds."""
    # By storage, since a saved tensor may be a view of a result that the caller holds.
    theirs = {item.storage for item in forward.outputs[:outputs] if item is not None}
    kept: list[int | Handed] = []
    for item in forward.outputs[outputs:]:
        kept.append(0 if item is None or item.storage in theirs else item)
    return kept


def _peak(found: Footprint, workspace: _Workspace) -> int:
    return max(found.peak, *(moment.bytes + workspace.at(moment) for moment in found.moments), 0)


class _Workspace:
    """What kernels of their own take while they run, by operator and shapes of the results.

    What a convolution takes depends on the layout of what it reads, and Inductor chooses that.
    """

    def __init__(self, lifted: Lifted, device: torch.device) -> None:
        self.known: dict[tuple[str, Shapes], int] = {}
        self.convolutions: dict[tuple[str, Shapes], list[fx.Node]] = {}
        measured = device.type == "cuda" and lifted.graph.prices.startswith("measured")
        self.weigh = Workspaces(device) if measured else None
        for op in lifted.graph.ops:
            node = lifted.node_of[op.name]
            key = (type_of(node).rpartition(".")[2], shapes_of(tensors_of(node)))
            self.known[key] = max(self.known.get(key, 0), op.workspace)
            if is_convolution(node):
                self.convolutions.setdefault(key, []).append(node)

    def at(self, moment: Moment) -> int:
        key = (moment.call.rpartition(".")[2], moment.outputs)
        nodes = self.convolutions.get(key)
        if self.weigh is None or not nodes:
            return self.known.get(key, 0)
        # Results of equal shape can come from other inputs; where none is alike, the largest is on the safe
        # side.
        alike = [node for node in nodes if _image_and_weight(node) == moment.inputs[:2]]
        return max(self.weigh(node, channels_last=moment.channels_last) for node in alike or nodes)


def _image_and_weight(node: fx.Node) -> Shapes:
    """The shapes of the first two tensors that a convolution reads; the text may add its bias elsewhere."""
    return tuple(shapes_of(tensors_of(part))[0] for part in node.all_input_nodes[:2])
