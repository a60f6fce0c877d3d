"""A captured graph whose sizes are symbols, written out for the sizes of a call.

Problem: torch's front end takes a second or more for each shape of a step, and most shapes of a step give the
same calls, with other numbers in them. Captured once with symbols in the place of the sizes that change, the
graph of a shape is a copy with numbers in their place: milliseconds. All that comes after it, from
AOTAutograd on, sees plain sizes, so bytes are exact and kernels those of a capture of that shape alone.

Method: what the graph computes of sizes alone is computed here, by the very calls that stand in the graph, on
the sizes of the call; tensors whose shape is asked for are stood in for on the meta device. Each number is
held against the expression that the front end has for it, the shapes of the inputs against the call's, and
those of the results against what the step returns. For which sizes a graph stands, the front end's own guards
say before each call.

Cost: one pass over the graph. Limits: not for graphs with graphs inside, such as those of custom autograd
functions, nor where a size is known only once the step runs; `Refused` says what it was.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from .._torch import SYMBOLIC, called, expression, module_of, traced_value, with_numbers
from ..errors import CaptureError
from .lift import source_line
from .sizes_by_symbols import is_number

__all__ = ["Fixed", "OpenGraph", "Refused"]

_OF_THE_CAPTURE = ("example_value", "grapharg")
"""What a node's `meta` has of the call that was captured, not of others."""


class Refused(Exception):  # noqa: N818  # not an error: each shape is captured by itself then
    """Raised where no numbers can be written into a graph; says why."""


@dataclass(frozen=True)
class Fixed:
    """A graph for the sizes of one call.

    `places` are the inputs of the open graph that it takes, `numbers` the results that are numbers, by their
    places among all, and `shapes` those of the tensors among the results.
    """

    module: fx.GraphModule
    places: tuple[int, ...]
    numbers: dict[int, Any]
    shapes: tuple[tuple[int, ...], ...]

    def results(self, found: Sequence[Any]) -> list[Any]:
        """What the open graph returns, from what this one does; refuses tensors of other shapes."""
        shapes = tuple(tuple(each.shape) for each in found if isinstance(each, torch.Tensor))
        if shapes != self.shapes:
            raise CaptureError(
                f"the step, captured for all sizes, returned tensors of the shapes {shapes}, and not "
                f"{self.shapes}. This is an error of Lowtide; dynamic=False captures each shape by itself"
            )
        given = iter(found)
        count = len(found) + len(self.numbers)
        return [self.numbers[at] if at in self.numbers else next(given) for at in range(count)]


class OpenGraph:
    """A captured graph in which some sizes are symbols; raises `Refused` where no numbers can stand there.

    `symbols` are the inputs that are numbers.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        if inner := [
            name for name, part in module.named_modules() if name and isinstance(part, fx.GraphModule)
        ]:
            raise Refused(f"{_reader(module, inner[0])} has a graph inside")
        self.module = module
        inputs = module.graph.find_nodes(op="placeholder")
        self.symbols = tuple(at for at, node in enumerate(inputs) if is_number(traced_value(node)))

    def fixed(self, args: Sequence[Any]) -> Fixed:
        """The graph for a call with these inputs."""
        for node in self.module.graph.find_nodes(op="placeholder"):
            node.meta.pop("grapharg", None)  # it has the tensors of the call that was captured
        return _Writing(self.module).written(args)


def _reader(module: fx.GraphModule, inner: str) -> str:
    """The call that a graph is handed to."""
    nodes = (node for node in module.graph.nodes if node.op == "get_attr" and node.target == inner)
    readers = [_called(user) for node in nodes for user in node.users]
    return readers[0] if readers else inner


@dataclass
class _Writing:
    """One pass over a graph: `copies` has a node for each of its tensors, and a value for each number."""

    module: fx.GraphModule
    graph: fx.Graph = field(default_factory=fx.Graph)
    copies: dict[fx.Node, Any] = field(default_factory=dict)
    known: dict[Any, int] = field(default_factory=dict)
    found: dict[Any, Any] = field(default_factory=dict)

    def written(self, args: Sequence[Any]) -> Fixed:
        """The copy of the whole graph."""
        inputs = self.module.graph.find_nodes(op="placeholder")
        self.take(inputs, args)
        for node in self.module.graph.nodes:
            if node.op not in ("placeholder", "output"):
                number = is_number(traced_value(node))
                self.copies[node] = self.computed(node) if number else self.copied(node)
        results = _results(self.module)
        tensors = [node for node in results if not is_number(traced_value(node))]
        self.graph.output(tuple(self.copies[node] for node in tensors))
        return Fixed(
            module_of(self.module, self.graph),
            tuple(at for at, node in enumerate(inputs) if not is_number(traced_value(node))),
            {at: self.copies[node] for at, node in enumerate(results) if is_number(traced_value(node))},
            tuple(self.shape(node) for node in tensors if isinstance(traced_value(node), torch.Tensor)),
        )

    def take(self, inputs: list[fx.Node], args: Sequence[Any]) -> None:
        """The inputs: numbers for the symbols, and tensors that have the sizes which the numbers say."""
        for node, given in zip(inputs, args, strict=True):
            value = traced_value(node)
            if isinstance(value, torch.SymInt) and expression(value).is_Symbol:
                self.known[expression(value)] = given
        for node, given in zip(inputs, args, strict=True):
            number = is_number(traced_value(node))
            told = self.number(traced_value(node)) if number else self.shape(node)
            had = given if number else tuple(given.shape)
            if had != told:
                raise Refused(f"its input {node.name} is {had}, and not {told}")
            self.copies[node] = given if number else self.copied(node)

    def shape(self, node: fx.Node) -> tuple[int, ...]:
        """The shape of a node's tensor for this call."""
        return tuple(map(self.number, traced_value(node).shape))

    def number(self, value: Any) -> Any:
        """What an expression of the sizes is for this call."""
        if not isinstance(value, SYMBOLIC):
            return value
        asked = expression(value)
        if asked not in self.found:
            self.found[asked] = with_numbers(value, self.known)
        if self.found[asked] is None:
            raise Refused(f"the size {asked} is known only once the step runs")
        return self.found[asked]

    def copied(self, node: fx.Node) -> fx.Node:
        """A node of the graph with numbers in its arguments."""
        if any(isinstance(each, SYMBOLIC) for each in _leaves([node.args, node.kwargs])):
            raise Refused(f"{_called(node)} has a size in it that no input tells")
        if traced_value(node) is None and any(is_number(traced_value(each)) for each in node.all_input_nodes):
            raise Refused(f"{_called(node)} takes a size, and what it returns is not known")
        args, kwargs = fx.map_arg((node.args, node.kwargs), self.argument)
        made = self.graph.create_node(node.op, node.target, args, kwargs, node.name, node.type)
        made.meta = {name: value for name, value in node.meta.items() if name not in _OF_THE_CAPTURE}
        if node.op == "call_method" and str(node.target).endswith("_"):
            self.keep_layouts(node)
        return made

    def argument(self, node: fx.Node) -> Any:
        """What stands for a node among the arguments of a copy."""
        made = self.copies[node]
        return tuple(made) if isinstance(made, torch.Size) else made

    def keep_layouts(self, node: fx.Node) -> None:
        """Let what a call in place reads keep its fake values: their strides are looked at."""
        for parent in node.all_input_nodes:
            value, made = traced_value(parent), self.copies[parent]
            if isinstance(value, torch.Tensor) and isinstance(made, fx.Node):
                with value.fake_mode:  # type: ignore[attr-defined]
                    made.meta["example_value"] = self.like(value, value.device)

    def like(self, value: torch.Tensor, device: Any) -> torch.Tensor:
        """An empty tensor with the sizes and strides that a fake one has for this call."""
        sizes, strides = (tuple(map(self.number, each)) for each in (value.shape, value.stride()))
        return torch.empty_strided(sizes, strides, dtype=value.dtype, device=device)

    def computed(self, node: fx.Node) -> Any:
        """What a node gives that computes numbers."""
        if node.op not in ("call_function", "call_method"):
            raise Refused(f"{_called(node)} gives a size, and is no call")
        args, kwargs = fx.map_arg((node.args, node.kwargs), self.value)
        if node.op == "call_method":
            made = getattr(args[0], str(node.target))(*args[1:], **kwargs)
        else:
            made = node.target(*args, **kwargs)  # type: ignore[operator]
        if not self.agree(made, traced_value(node)):
            raise Refused(f"{_called(node)} gives {made}, and not {traced_value(node)}")
        return made

    def value(self, node: fx.Node) -> Any:
        """What a node stands for where numbers are computed: a number, or a tensor without data."""
        value = traced_value(node)
        if is_number(value):
            return self.copies[node]
        if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
            raise Refused(f"a size is computed from {_called(node)}, which is no plain tensor")
        return self.like(value, "meta")

    def agree(self, made: Any, traced: Any) -> bool:
        """Whether numbers are what the front end has expressions of."""
        if isinstance(traced, list | tuple):
            return len(made) == len(traced) and all(map(self.agree, made, traced))
        told = self.number(traced)
        return made == told or (isinstance(told, float) and math.isclose(made, told))


def _results(module: fx.GraphModule) -> list[fx.Node]:
    (output,) = module.graph.find_nodes(op="output")
    given: Any = output.args[0]
    if not isinstance(given, list | tuple) or not all(isinstance(each, fx.Node) for each in given):
        raise Refused("it returns something that is no row of results")
    return list(given)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    elif isinstance(value, slice):
        value = [value.start, value.stop, value.step]
    if not isinstance(value, list | tuple):
        yield value
        return
    for each in value:
        yield from _leaves(each)


def _called(node: fx.Node) -> str:
    """What a user knows a node by, and where it stands."""
    line = source_line(node)
    return called(node) + (f" at {line}" if line else "")
