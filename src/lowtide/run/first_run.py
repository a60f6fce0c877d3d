"""The first run of a graph, in which everything that an op returns is looked at.

A plan counts on the strides and sizes that tracing foretold. Where these were not measured they are compared
with the real ones, once: the function that runs first has a look after each op, and is replaced by the plain
one when it has run. The results are the same; the looks hold nothing and make no tensor.

What a plan overwrites must be nobody else's. So where an op returned a tensor that shares its storage with
what it read, unforetold, nothing is overwritten any more; and where hooks of the user's have seen what the
forward saved (`torch.autograd.graph.saved_tensors_hooks`), the backward overwrites what it made alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from .._torch import boxed, private
from ..capture.fx_nodes import is_item, read_by, storage_of, tensors_of
from ..capture.in_place import IN_PLACE
from ..capture.kernel_outputs import Outputs, as_foretold, items_of, outputs_of
from ..capture.op_signature import signature
from ..measuring.tracker import live_storages
from .eager import Overwrites, compile_graph

__all__ = ["Misfits", "checked"]


@dataclass
class Misfits:
    """What ops returned otherwise than foretold, by signature; the first of them; what was alive at once.

    `ran` says that a first run has begun, `shared` that something shares a storage that was not foretold to,
    `seen` that hooks have seen what the forward saved.
    """

    tracker: live_storages
    facts: dict[str, Outputs] = field(default_factory=dict)
    first: fx.Node | None = None
    ran: bool = False
    shared: bool = False
    seen: bool = False

    @property
    def overwrites(self) -> Overwrites:
        """What may be overwritten."""
        return "nothing" if self.shared else "what it made" if self.seen else "all"

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
    return boxed(_Checked(module, name, misfits))


class _Checked:
    """The function of a graph: one that looks, for its first run, then one that overwrites what it may."""

    def __init__(self, module: fx.GraphModule, name: str, misfits: Misfits) -> None:
        self.module: fx.GraphModule | None = module
        self.name = name
        self.misfits = misfits
        self.first: Callable[[list[Any]], Any] | None = compile_graph(module, name, look=_Looks(misfits))
        self.forms: dict[Overwrites, Callable[[list[Any]], Any]] = {}

    def __call__(self, args: list[Any]) -> Any:
        if self.name == "forward" and private("saving_hooks")(True) is not None:
            self.misfits.seen = True
        if self.first is None:
            return self.form()(args)
        self.misfits.start(args, backward=self.name == "backward")
        self.misfits.ran = True
        results, self.first = self.first(args), None
        return results

    def form(self) -> Callable[[list[Any]], Any]:
        overwrites = self.misfits.overwrites
        if overwrites == "what it made" and self.name == "forward":
            overwrites = "all"  # nothing that came into a forward is ever overwritten
        if overwrites not in self.forms:
            assert self.module is not None
            self.forms[overwrites] = compile_graph(self.module, self.name, overwrites=overwrites)
            if self.name == "forward":  # it will not change any more, and need not be kept
                self.module = None
        return self.forms[overwrites]


class _Looks:
    """Compares what a node returns with its fake tensors; `read` are the arguments that it was given."""

    def __init__(self, misfits: Misfits) -> None:
        self.misfits = misfits
        self.off: set[fx.Node] = set()

    def wanted(self, node: fx.Node) -> bool:
        """Whether a node is looked at: items are seen with the op that returns them."""
        return node.op == "call_function" and not is_item(node) and bool(tensors_of(node))

    def trusts(self) -> bool:
        """Whether an argument may be overwritten: nothing shares storage that was not foretold to."""
        return not self.misfits.shared

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
        tensors = [tensor for tensors in given.values() for tensor in tensors]
        if IN_PLACE in node.meta and storage_of(result) in map(storage_of, tensors):
            return  # it has overwritten one of them, which lay as foretold
        real = outputs_of(result, tensors)
        fits = as_foretold(real, value, read_by(node))
        self.misfits.shared |= not fits and _shares(real) != _shares(outputs_of(value, read_by(node)))
        # An op that got other strides than foretold is noted as well, even if its own outputs fit: its
        # signature has changed, and the next plan looks it up by that.
        if fits and self.off.isdisjoint(given):
            return
        self.misfits.facts[signature(node, given.__getitem__)] = real
        if not fits:
            self.off.update((node, *filter(is_item, node.users)))
            self.misfits.first = self.misfits.first or node


def _shares(outputs: Outputs) -> list[int | None]:
    return [None if output is None else output.shares for output in outputs]


def _tensors(item: Any) -> list[torch.Tensor]:
    return [leaf for leaf in private("tree_leaves")(item) if isinstance(leaf, torch.Tensor)]
