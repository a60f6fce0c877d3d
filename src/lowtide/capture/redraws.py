"""The draws of a captured step, made without the step: they tell what will be drawn at a place of it.

Whether LayerDrop leaves out a layer is drawn in the middle of a step, after the masks of dropout of the
layers before. So these are drawn as well, each into a buffer that goes at once, in their order and as many
numbers as in the step; the numbers depend on the random state alone. Draws of a GPU come from another
generator: there only those of the host are made, which are the numbers themselves.

Known are `torch.rand` and its kin, dropout, and both functions of attention with dropout. Which calls draw
is not taken from a list: every call of the trace is tried on fake tensors, and one that draws on the host in
another way makes the branch one that cannot be followed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.nn import functional

from .._torch import private, traced_value
from .rewrites.random_draws import draws_numbers

__all__ = ["Redraw", "redraws_of"]

_CREATED = (torch.rand, torch.randn, torch.randint, torch.randperm)


@dataclass(frozen=True)
class Redraw:
    """A function and its arguments, which draw as many numbers as a node of a trace."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def redraws_of(nodes: Iterable[fx.Node]) -> dict[fx.Node, Redraw] | None:
    """The draws on the host among some nodes; None where one of them draws in a way that is not known."""
    found: dict[fx.Node, Redraw] = {}
    for node in nodes:
        if not _draws_on_host(node):
            continue
        redraw = _redraw(node)
        if redraw is None:
            return None
        found[node] = redraw
    return found


def _redraw(node: fx.Node) -> Redraw | None:
    if node.target in _CREATED and not node.all_input_nodes:
        return Redraw(node.target, tuple(node.args), dict(node.kwargs))  # type: ignore[arg-type]
    if node.target is functional.dropout and isinstance(node.args[0], fx.Node):
        like = traced_value(node.args[0])
        return _mask(tuple(like.shape), _argument(node, 1, "p", 0.5), like.dtype)
    if node.target is functional.scaled_dot_product_attention:
        query, key = (traced_value(argument) for argument in node.args[:2])
        shape = (*query.shape[:-1], key.shape[-2])
        return _mask(shape, _argument(node, 4, "dropout_p", 0.0), query.dtype)
    if node.target is functional.multi_head_attention_forward:
        return _attention_weights(node)
    return None


def _attention_weights(node: fx.Node) -> Redraw | None:
    """The mask over the weights of all heads; None where keys are added to those that are given."""
    (length, *batch, _), (keys, *_) = (traced_value(argument).shape for argument in node.args[:2])
    extended = node.args[7] is not None or bool(node.args[9]) or _argument(node, 21, "static_k", None)
    if extended or not _argument(node, 13, "training", True):
        return None
    shape = (*batch, node.args[4], length, keys)
    return _mask(shape, node.args[10], traced_value(node.args[0]).dtype)


def _mask(shape: tuple[int, ...], rate: Any, dtype: torch.dtype) -> Redraw:
    return Redraw(draw_mask, (shape, rate, dtype), {})


def draw_mask(shape: tuple[int, ...], rate: float, dtype: torch.dtype) -> None:
    """Draw a mask of dropout as eager does on the host."""
    torch.empty(shape, dtype=dtype).bernoulli_(1 - rate)


def _argument(node: fx.Node, index: int, name: str, default: Any) -> Any:
    return node.args[index] if index < len(node.args) else node.kwargs.get(name, default)


_SEEN = "lowtide_draws_on_host"


def _draws_on_host(node: fx.Node) -> bool:
    if node.op not in ("call_function", "call_method"):
        return False
    if _SEEN not in node.meta:
        node.meta[_SEEN] = _tried(node)
    return bool(node.meta[_SEEN])


def _tried(node: fx.Node) -> bool:
    """Whether a call draws on the host, tried on fake tensors; yes where it cannot be tried."""
    values = (traced_value(parent) for parent in (*node.all_input_nodes, node))
    mode = next((each.fake_mode for value in values for each in _fakes(value)), None)
    if mode is None:
        return False  # it neither reads nor makes a tensor
    with mode, torch.no_grad(), _Watch() as watch:
        try:
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda parent: _copied(traced_value(parent)))
            _called(node, args, kwargs)
        except Exception:  # a function of functions, say, whose parts are graphs of their own
            return True
    return bool(watch.drew)


def _called(node: fx.Node, args: Any, kwargs: Any) -> None:
    if node.op == "call_method":
        getattr(args[0], str(node.target))(*args[1:], **kwargs)
    else:
        node.target(*args, **kwargs)  # type: ignore[operator]


def _fakes(value: Any) -> list[Any]:
    return [leaf for leaf in private("tree_leaves")(value) if isinstance(leaf, private("FakeTensor"))]


def _copied(value: Any) -> Any:
    """Fake tensors of the same sizes: calls in place may not count on those of the trace."""
    return private("tree_map_only")(torch.Tensor, lambda t: torch.empty_like(t, requires_grad=False), value)


class _Watch(private("TorchDispatchMode")):  # type: ignore[misc]
    """Sees whether an operator on the host draws."""

    drew = False

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operator(*args, **(kwargs or {}))
        leaves = private("tree_leaves")((args, result))
        on_host = any(leaf.device.type == "cpu" for leaf in leaves if isinstance(leaf, torch.Tensor))
        if on_host and draws_numbers(operator, args, kwargs or {}):
            self.drew = True
        return result
