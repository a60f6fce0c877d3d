"""Sizes of tensors in a trace whose sizes are symbols: known from the inputs alone, with no tensor at hand.

`y.shape[1]` of an activation stands in a trace as a call on that tensor. What a branch asks may need that
number and not the activation: the front end has an expression for it, whose symbols are inputs of the trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from .._torch import SYMBOLIC, expression, traced_value, with_numbers

__all__ = ["is_number", "is_size", "read_for", "written_size"]


def is_number(value: Any) -> bool:
    """Whether a node's value is a number or a flag, or a row of them."""
    if isinstance(value, list | tuple):
        return bool(value) and all(map(is_number, value))
    return isinstance(value, (int, float, *SYMBOLIC))


def read_for(node: fx.Node) -> list[fx.Node]:
    """The nodes that a node is computed from; for the sizes of a tensor the inputs that are their symbols."""
    return list(_inputs_of(node).values()) if is_size(node) else node.all_input_nodes


def is_size(node: fx.Node) -> bool:
    """Whether a node asks a tensor for numbers that the inputs tell as well."""
    if node.op == "placeholder" or not is_number(traced_value(node)):
        return False
    if not any(isinstance(traced_value(parent), torch.Tensor) for parent in node.all_input_nodes):
        return False
    return _symbols(traced_value(node)) <= _inputs_of(node).keys()


def written_size(graph: fx.Graph, node: fx.Node, copies: Callable[[fx.Node], Any]) -> Any:
    """What stands for such a node in another graph, which has copies of its inputs."""
    inputs = _inputs_of(node)

    def written(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return tuple(map(written, value))
        if not isinstance(value, SYMBOLIC):
            return value
        if (symbol := expression(value)) in inputs:
            return copies(inputs[symbol])
        symbols = sorted(_symbols(value), key=str)
        return graph.call_function(_computed(value, symbols), tuple(copies(inputs[each]) for each in symbols))

    return written(traced_value(node))


def _computed(value: Any, symbols: list[Any]) -> Callable[..., Any]:
    def size_by_symbols(*numbers: int) -> Any:
        return with_numbers(value, dict(zip(symbols, numbers, strict=True)))

    return size_by_symbols


def _symbols(value: Any) -> set[Any]:
    """The symbols in a number, or in a row of numbers."""
    if isinstance(value, list | tuple):
        return set().union(*map(_symbols, value))
    return set(expression(value).free_symbols) if isinstance(value, SYMBOLIC) else set()


def _inputs_of(node: fx.Node) -> dict[Any, fx.Node]:
    """The input for each symbol that a node's numbers are made of, as far as there is one."""
    asked = _symbols(traced_value(node))
    return {symbol: each for symbol, each in _symbol_inputs(node.graph) if symbol in asked}


def _symbol_inputs(graph: fx.Graph) -> Iterator[tuple[Any, fx.Node]]:
    for node in graph.find_nodes(op="placeholder"):
        value = traced_value(node)
        if isinstance(value, torch.SymInt):
            yield expression(value), node
