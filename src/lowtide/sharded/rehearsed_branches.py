"""Branches on a batch's data in code that is rehearsed on fake tensors, answered by the batch itself.

Fake tensors have no values, and code between the units of a sharded model may look at some: `transformers`
asks whether a mask is all ones and leaves it out. What the rehearsed code computes from the batch in flags
and whole numbers is written down as a graph. Where it branches on one of them, that part of the graph runs on
the real batch. The answers are conditions of the rehearsal (`conditions`): a batch that answers otherwise has
a rehearsal of its own.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import fx
from torch.utils.weak import WeakTensorKeyDictionary

from .._torch import private, private_of
from ..capture.branches import WHOLE
from ..capture.conditions import Conditions, answers_of, cut_conditions, mark, question
from ..capture.plain_masks import makes_masks

__all__ = ["RehearsedBranches"]

_leaves, _map_tensors = private("tree_leaves"), private("tree_map_only")

ASKS = torch.ops.aten._local_scalar_dense.default
"""The operator that brings a value to Python."""


class RehearsedBranches:
    """What rehearsed code computes from the tensors of a batch, which stand behind fake ones."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.real: list[torch.Tensor] = []
        self.known: Any = WeakTensorKeyDictionary()

    def give(self, fake: torch.Tensor, real: torch.Tensor) -> None:
        """Let a fake tensor stand for one of the batch."""
        if fake not in self.known and not real.requires_grad:
            self.know(fake, self.graph.placeholder(f"input_{len(self.real)}"))
            self.real.append(real)

    def know(self, fake: torch.Tensor, node: fx.Node) -> None:
        self.known[fake] = node, private_of(fake, "version")

    def node_of(self, fake: torch.Tensor) -> fx.Node | None:
        """The node of a tensor that nobody has written to since; None for what is not known."""
        node, version = self.known.get(fake, (None, None))
        return node if version == private_of(fake, "version") else None

    def answer(self, operator: Any, args: Any) -> bool | None:
        """What Python is told where code branches on a flag; None where it asks for something else.

        Code that makes masks asks whether it can do without, and is told no where that is not known.
        """
        if operator is not ASKS or args[0].dtype != torch.bool:
            return None
        node = self.node_of(args[0])
        if node is None:
            return False if makes_masks(_asking_module()) else None
        asked = question([node])
        assert asked is not None, "a rehearsal knows of no draws"
        ask, inputs = asked
        places = self.graph.find_nodes(op="placeholder")
        with private("without_modes")(), torch.no_grad():
            (said,) = answers_of(ask(*(self.real[places.index(each)] for each in inputs)))
        if inputs:
            self.graph.call_function(mark, (node, said))
        return said

    def note(self, operator: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Write down what an operator did, where it is known of what, and its result is whole."""
        if not isinstance(result, torch.Tensor) or result.dtype not in WHOLE or result in self.known:
            return
        if private_of(operator, "schema").is_mutable or torch.Tag.nondeterministic_seeded in operator.tags:
            return
        inputs = [leaf for leaf in _leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if all(self.node_of(leaf) is not None for leaf in inputs):
            of_nodes = _map_tensors(torch.Tensor, self.node_of, (args, kwargs))
            self.know(result, self.graph.call_function(operator, *of_nodes))

    def conditions(self) -> Conditions | None:
        """What the rehearsal holds for: conditions on the tensors of a batch."""
        self.graph.output(())
        return cut_conditions(fx.GraphModule({}, self.graph))


def _asking_module() -> str:
    """The module whose code brings a value to Python: the first one that is not of torch or Lowtide."""
    own, frame = __name__.partition(".")[0], inspect.currentframe()
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        if name.partition(".")[0] not in ("torch", own):
            return name
        frame = frame.f_back
    return ""
