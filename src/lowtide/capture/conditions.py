"""Conditions on a step's inputs that a captured graph stands for, asked again before every call.

A branch that was taken while the step was captured (`branches`) leaves a mark in the graph: the tensor that
was asked, and what it said. The marks are taken out here, and what they depend on becomes a small graph of
its own over the step's inputs. Where a later batch answers otherwise, its step is another graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

__all__ = ["Conditions", "OtherData", "cut_conditions", "mark", "question", "what_it_reads"]


class OtherData(Exception):  # noqa: N818  # not an error: the call goes on with another graph
    """Raised before a step runs whose conditions do not hold; `answers` are what they say instead."""

    def __init__(self, answers: tuple[bool, ...]) -> None:
        super().__init__("the batch answers otherwise than the one that the step was captured with")
        self.answers = answers


@fx.node.has_side_effect
def mark(condition: torch.Tensor, answer: bool) -> None:
    """Stands in a captured graph for a condition, and for what it said."""


@dataclass(frozen=True)
class Conditions:
    """What was asked of the inputs at some places, and what they answered when the step was captured."""

    ask: fx.GraphModule
    places: tuple[int, ...]
    answers: tuple[bool, ...]

    def must_hold(self, args: Sequence[Any]) -> None:
        """Raise OtherData where the inputs of a call say something else; one look at the device for all."""
        found = answers_of(self.ask(*(args[place] for place in self.places)))
        if found != self.answers:
            raise OtherData(found)


def cut_conditions(module: fx.GraphModule) -> Conditions | None:
    """Take the marks out of a captured graph; None where there are none."""
    marks = module.graph.find_nodes(op="call_function", target=mark)
    if not marks:
        return None
    inputs = module.graph.find_nodes(op="placeholder")
    answers = {node.args[0]: bool(node.args[1]) for node in marks}  # each condition once
    ask, read = question(answers)
    for node in marks:
        module.graph.erase_node(node)
    module.recompile()  # what nobody reads now is left to AOTAutograd: in-place calls are read by nobody, too
    return Conditions(ask, tuple(map(inputs.index, read)), tuple(answers.values()))


def question(conditions: Iterable[fx.Node]) -> tuple[fx.GraphModule, list[fx.Node]]:
    """The function of some nodes of a graph, and the inputs that it takes."""
    asked = list(conditions)
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    read = what_it_reads(asked)
    inputs = [node for node in read if node.op == "placeholder"]
    for node in (*inputs, *(node for node in read if node.op != "placeholder")):
        copies[node] = graph.node_copy(node, copies.__getitem__)
        copies[node].meta = {}  # torch's own has what it captured, and would keep it alive
    graph.output(tuple(copies[node] for node in asked))
    return fx.GraphModule({}, graph), inputs


def what_it_reads(conditions: Iterable[fx.Node]) -> list[fx.Node]:
    """All nodes that some nodes are computed from, and they themselves, in the order of their graph."""
    found, waiting = set[fx.Node](), list(conditions)
    graph = waiting[0].graph
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return [node for node in graph.nodes if node in found]


def answers_of(conditions: Sequence[torch.Tensor]) -> tuple[bool, ...]:
    """What tensors of one element say when Python branches on them."""
    if len(conditions) == 1:
        return (bool(conditions[0]),)
    home = conditions[0].device
    return tuple(torch.cat([each.reshape(1).bool().to(home) for each in conditions]).tolist())
