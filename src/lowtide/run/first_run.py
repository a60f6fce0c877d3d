"""The first run of a graph, in which everything that an op returns is looked at.

A plan counts on the strides and sizes that tracing foretold. Where these were not measured they are compared
with the real ones, once: the function that runs first has a look after each op, and is replaced by the plain
one when it has run. The results are the same; the looks hold nothing and make no tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from .._torch import boxed, private
from ..capture.fx_nodes import is_item, read_by, tensors_of
from ..capture.kernel_outputs import Outputs, as_foretold, items_of, outputs_of
from ..capture.op_signature import signature
from ..measuring.tracker import live_storages
from .eager import compile_graph

__all__ = ["Misfits", "checked"]


@dataclass
class Misfits:
    """What ops returned otherwise than foretold, by signature; the first of them; what was alive at once.

    `ran` says that a first run has begun.
    """

    tracker: live_storages
    facts: dict[str, Outputs] = field(default_factory=dict)
    first: fx.Node | None = None
    ran: bool = False

    @classmethod
    def on(cls, device: torch.device | str) -> Misfits:
        """None yet."""
        return cls(live_storages(device))

    def start(self, args: list[Any], *, backward: bool) -> None:
        """Count what a graph is given; what is new to a backward was made since: gradients of outputs."""
        for tensor in _tensors(args):
            (self.tracker.make if backward else self.tracker.give)(tensor)


def checked(module: fx.GraphModule, name: str, misfits: Misfits) -> Callable[[list[Any]], Any]:
    """The boxed function of a graph, "forward" or "backward"; its first run adds to `misfits`."""
    plain = compile_graph(module, name)
    first: Callable[[list[Any]], Any] | None = compile_graph(module, name, look=_Looks(misfits))

    def call(args: list[Any]) -> Any:
        nonlocal first
        if first is None:
            return plain(args)
        misfits.start(args, backward=name == "backward")
        misfits.ran = True
        results, first = first(args), None
        return results

    return boxed(call)


class _Looks:
    """Compares what a node returns with its fake tensors; `read` are the arguments that it was given."""

    def __init__(self, misfits: Misfits) -> None:
        self.misfits = misfits
        self.off: set[fx.Node] = set()

    def wanted(self, node: fx.Node) -> bool:
        """Whether a node is looked at: items are seen with the op that returns them."""
        return node.op == "call_function" and not is_item(node) and bool(tensors_of(node))

    def __call__(self, node: fx.Node, result: Any, read: tuple[Any, ...]) -> None:
        for tensor in _tensors(result):
            self.misfits.tracker.make(tensor)
        self.misfits.tracker.note_peak()
        value = node.meta["val"]
        if len(items_of(value)) != len(items_of(result)):
            return
        given = {parent: _tensors(item) for parent, item in zip(node.all_input_nodes, read, strict=True)}
        if any(len(tensors) != len(tensors_of(parent)) for parent, tensors in given.items()):
            return  # a gradient that did not come
        real = outputs_of(result, [tensor for tensors in given.values() for tensor in tensors])
        fits = as_foretold(real, value, read_by(node))
        # An op that got other strides than foretold is noted as well, even if its own outputs fit: its
        # signature has changed, and the next plan looks it up by that.
        if fits and self.off.isdisjoint(given):
            return
        self.misfits.facts[signature(node, given.__getitem__)] = real
        if not fits:
            self.off.update((node, *filter(is_item, node.users)))
            self.misfits.first = self.misfits.first or node


def _tensors(item: Any) -> list[torch.Tensor]:
    return [leaf for leaf in private("tree_leaves")(item) if isinstance(leaf, torch.Tensor)]
