"""Conditions on a step's inputs that a captured graph stands for, asked again before every call.

A branch that was taken while the step was captured (`branches`) leaves a mark in the graph: the tensor that
was asked, and what it said. The marks are taken out here, and what they depend on becomes a small graph of
its own over the step's inputs. Where a later batch answers otherwise, its step is another graph.

Where a condition is drawn, that small graph draws all that the step draws on the host before it, from the
same random state, which is put back (`redraws`). After the first run of a step the state must be the one that
all of its draws, made so, lead to.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..errors import CaptureError, GraphBreak
from ..torch_state.random_state import look_at_state, put_state
from .asked_nodes import what_it_reads, writes
from .compared_draws import is_drawn_on_host
from .redraws import Redraw, redraws_of
from .sizes_by_symbols import is_size, written_size

__all__ = ["Conditions", "OtherData", "cut_conditions", "mark", "question"]


class OtherData(Exception):  # noqa: N818  # not an error: the call goes on with another graph
    """Raised before a step runs whose conditions do not hold; `answers` are what they say instead.

    Where some of them are `drawn`, it is the random state that says something else.
    """

    def __init__(self, answers: tuple[bool, ...], *, drawn: bool = False) -> None:
        super().__init__("the batch answers otherwise than the one that the step was captured with")
        self.answers = answers
        self.drawn = drawn


@fx.node.has_side_effect
def mark(condition: torch.Tensor, answer: bool) -> None:
    """Stands in a captured graph for a condition, and for what it said."""


@dataclass(frozen=True)
class Conditions:
    """What was asked of the inputs at some places, and what they answered when the step was captured."""

    ask: fx.GraphModule
    places: tuple[int, ...]
    answers: tuple[bool, ...]
    draw: fx.GraphModule | None = None

    def must_hold(self, args: Sequence[Any]) -> None:
        """Raise OtherData where the inputs of a call say something else; one look at the device for all.

        What comes after the first other answer is of a road that the call does not take.
        """
        with _state_put_back() if self.draw is not None else nullcontext():
            found = answers_of(self.ask(*(args[place] for place in self.places)))
        if found != self.answers:
            other = next(
                n for n, pair in enumerate(zip(found, self.answers, strict=True)) if pair[0] != pair[1]
            )
            raise OtherData(found[: other + 1], drawn=self.draw is not None)

    def state_after(self) -> torch.Tensor | None:
        """The random state of the host after the forward of a step that begins now; None with no draws."""
        if self.draw is None:
            return None
        with _state_put_back():
            self.draw()
            return look_at_state("cpu")

    def must_have_drawn(self, foretold: torch.Tensor | None) -> None:
        """Refuse a step whose forward drew otherwise than was foretold: its branches may be wrong ones."""
        if foretold is not None and not torch.equal(foretold, look_at_state("cpu")):
            raise CaptureError(
                "a branch of the step depends on a random number, and the step draws others before it than "
                "could be foretold. Set the rate of dropped layers to zero (config.layerdrop = 0)"
            )


@contextmanager
def _state_put_back() -> Iterator[None]:
    before = look_at_state("cpu")
    try:
        yield
    finally:
        put_state(before, "cpu")


def cut_conditions(module: fx.GraphModule) -> Conditions | None:
    """Take the marks out of a captured graph; None where there are none."""
    marks = module.graph.find_nodes(op="call_function", target=mark)
    if not marks:
        return None
    inputs = module.graph.find_nodes(op="placeholder")
    answers = {node.args[0]: bool(node.args[1]) for node in marks}  # each condition once
    asked = question(answers)
    draw = _all_draws(module.graph) if any(map(is_drawn_on_host, answers)) else None
    if asked is None or (draw is None and any(map(is_drawn_on_host, answers))):
        raise GraphBreak(
            "the step is not one graph: a branch depends on a random number, and what else the step draws is "
            "not known. Set the rate of dropped layers to zero (config.layerdrop = 0)"
        )
    ask, read = asked
    for node in marks:
        module.graph.erase_node(node)
    module.recompile()  # what nobody reads now is left to AOTAutograd: in-place calls are read by nobody, too
    return Conditions(ask, tuple(map(inputs.index, read)), tuple(answers.values()), draw)


def question(conditions: Iterable[fx.Node]) -> tuple[fx.GraphModule, list[fx.Node]] | None:
    """The function of some nodes of a graph, and the inputs that it takes; None where it cannot be asked.

    Before a number that is drawn all others are drawn that the step draws before it.
    """
    asked = list(conditions)
    graph, copies = fx.Graph(), dict[fx.Node, Any]()
    read = what_it_reads(asked)
    redraws = _draws_before(asked)
    if redraws is None:
        return None
    inputs = [node for node in read if node.op == "placeholder"]
    written = any(map(writes, read))
    for node in (*inputs, *_in_order({*read, *redraws} - {*inputs})):
        if node in redraws:
            copies[node] = _call(graph, redraws[node])
        elif is_size(node):
            copies[node] = written_size(graph, node, copies.__getitem__)
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            copies[node].meta = {}  # torch's own has what it captured, and would keep it alive
        if written and node in asked:  # as it is now, whatever is written later
            copies[node] = graph.call_method("clone", (copies[node],))
    graph.output(tuple(copies[node] for node in asked))
    return fx.GraphModule({}, graph), inputs


def _draws_before(asked: list[fx.Node]) -> dict[fx.Node, Redraw] | None:
    """The draws of the host before the last condition that is drawn; None where they are not known."""
    drawn = {node for node in asked if is_drawn_on_host(node)}
    if not drawn:
        return {}
    last = _in_order(drawn)[-1]
    return redraws_of(_until(last))


def _until(last: fx.Node) -> Iterator[fx.Node]:
    for node in last.graph.nodes:
        if node is last:
            return
        yield node


def _in_order(nodes: set[fx.Node]) -> list[fx.Node]:
    return [node for node in next(iter(nodes)).graph.nodes if node in nodes] if nodes else []


def _all_draws(graph: fx.Graph) -> fx.GraphModule | None:
    """A function that draws all that a graph draws on the host."""
    redraws = redraws_of(graph.nodes)
    if redraws is None:
        return None
    made = fx.Graph()
    for redraw in redraws.values():
        _call(made, redraw)
    made.output(None)
    return fx.GraphModule({}, made)


def _call(graph: fx.Graph, redraw: Redraw) -> fx.Node:
    return graph.call_function(redraw.function, redraw.args, redraw.kwargs)


def answers_of(conditions: Sequence[torch.Tensor]) -> tuple[bool, ...]:
    """What tensors of one element say when Python branches on them."""
    if len(conditions) == 1:
        return (bool(conditions[0]),)
    home = conditions[0].device
    return tuple(torch.cat([each.reshape(1).bool().to(home) for each in conditions]).tolist())
