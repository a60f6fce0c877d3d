"""New calls in a joint graph, beside a node whose module and line they are known by."""

from __future__ import annotations

from typing import Any

from torch import fx

__all__ = ["call_after", "call_before"]


def call_before(place: fx.Node, target: Any, *args: Any) -> fx.Node:
    """A call of some nodes, before another node."""
    with place.graph.inserting_before(place):
        return _call(place, target, args)


def call_after(place: fx.Node, target: Any, *args: Any) -> fx.Node:
    """A call of some nodes, after another node."""
    with place.graph.inserting_after(place):
        return _call(place, target, args)


def _call(place: fx.Node, target: Any, args: tuple[Any, ...]) -> fx.Node:
    call = place.graph.call_function(target, args)
    with call.all_input_nodes[0].meta["val"].fake_mode:
        value = target(*fx.map_arg(args, lambda arg: arg.meta["val"]))
    call.meta = {**place.meta, "val": value}
    return call
