"""Autocast as eager has it: the state that a backward runs in, and weights that are cast once.

A training loop calls the forward under autocast and `backward()` outside of it. AOTAutograd traces both in
one go, under the state of the forward unless it is told another: so each capture is told the state that the
backward is expected in, and the state that it comes in is compared with that one (`pipeline/in_flight.py`).

Eager casts a weight once in an autocast region, however often it is read: the gradients of all its readers
are added up in the lower precision and cast back once. A trace casts it for every reader, and adds up in
single precision. `cast_once` brings eager's form back, bit for bit.

A few operators are one kernel that calls matrix products inside. Under autocast these products are cast in
eager; in a captured step they are called with autocast off, so `cast_inside` puts it back around them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..._torch import autocast_knows, private
from ...torch_state.autocast_state import State, present_state, under_autocast
from ..fx_nodes import depends_on

__all__ = ["cast_inside", "cast_once", "mark_regions"]

aten = torch.ops.aten


_MARK = "lowtide autocast"


@dataclass(frozen=True)
class Region:
    """Where an operator that the user called stands: within the n-th outermost autocast, in that state."""

    number: int
    state: State
    caches: bool
    operator: str

    @property
    def casts(self) -> bool:
        """Whether the operator is a cast that the user wrote, which eager makes each time."""
        return self.operator in ("to", "type", "type_as", "bfloat16", "half", "float", "_to_copy")

    def inside(self) -> State:
        """The state that the operator's own kernels run in: none where autocast knows the operator itself."""
        return tuple((kind, dtype) for kind, dtype in self.state if not autocast_knows(self.operator, kind))


def mark_regions(graph: fx.Graph) -> None:
    """Leave at each node of Dynamo's graph which autocast it runs under; AOTAutograd hands the marks on."""
    # Autocast may be on around the whole call, before Dynamo's graph begins.
    stack = [(0, dict(present_state()), torch.is_autocast_cache_enabled())]
    ambient, count = bool(stack[0][1]), 0
    for node in graph.nodes:
        if node.target is private("enter_autocast"):
            kind, dtype, enabled, caches = _arguments(node)
            count += len(stack) == 1 and not ambient  # an inner one shares what the outermost has cast
            state = {**stack[-1][1], kind: dtype}
            if not enabled:
                del state[kind]
            stack.append((count, state, caches))
        elif node.target is private("exit_autocast"):
            stack.pop()
        elif node.op not in ("placeholder", "output"):
            number, state, caches = stack[-1]
            mark = Region(number, tuple(sorted(state.items())), caches, _name(node))
            node.meta["custom"] = {**(node.meta.get("custom") or {}), _MARK: mark}


def _arguments(node: fx.Node) -> tuple[str, torch.dtype, bool, bool]:
    """What an autocast is entered with: the device's kind, the dtype, whether it is on, whether it caches."""
    given: list[Any] = [*node.args, *[None] * (4 - len(node.args))]
    kind, dtype, enabled, caches = given
    return (
        str(kind),
        dtype or torch.get_autocast_dtype(str(kind)),
        enabled is not False,
        torch.is_autocast_cache_enabled() if caches is None else bool(caches),
    )


def _name(node: fx.Node) -> str:
    return str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")


def _region(node: fx.Node) -> Region | None:
    found = (node.meta.get("custom") or {}).get(_MARK)
    return found if isinstance(found, Region) else None


def cast_once(
    graph: fx.Graph, primals: Sequence[fx.Node], gradients: Sequence[Any], cached: frozenset[int]
) -> None:
    """Cast each weight once in a region, and add up the gradients of its readers before they are cast back.

    `cached` are the indices of the primals whose casts eager keeps: single-precision leaves that train.
    """
    for index in sorted(cached):
        gradient = gradients[index]
        for casts in _shared_casts(primals[index]):
            gradient = _joined(graph, gradient, {cast.meta.get("seq_nr") for cast in casts})
            for other in casts[1:]:
                other.replace_all_uses_with(casts[0])
                graph.erase_node(other)


def _shared_casts(primal: fx.Node) -> Iterator[list[fx.Node]]:
    """The casts of a weight that autocast made, by region, where there are several."""
    found: dict[tuple[int, torch.dtype], list[fx.Node]] = defaultdict(list)
    for user in primal.users:
        region = _region(user)
        if user.target is not aten._to_copy.default or region is None or region.casts:
            continue
        dtype = user.meta["val"].dtype
        # Only casts to the region's own dtype are kept by eager's cache.
        if region.caches and (primal.meta["val"].device.type, dtype) in region.state:
            found[region.number, dtype].append(user)
    return (casts for casts in found.values() if len(casts) > 1)


def _joined(graph: fx.Graph, gradient: Any, sequence_numbers: set[Any]) -> Any:
    """The gradient, where the terms that come from those casts are added first and are cast back once.

    The engine adds up from the left, as gradients come. What one cast node would get it hands on with the
    last of them; a backward node has the sequence number of its forward one.
    """
    terms, sums = _terms(gradient)
    joined = [
        term
        for term in terms
        if term.target is aten._to_copy.default and term.meta.get("seq_nr") in sequence_numbers
    ]
    if len(joined) < 2:
        return gradient
    low: fx.Node | None = None
    total: fx.Node | None = None
    for place, term in zip([sums[0], *sums], terms, strict=True):
        with graph.inserting_before(place):
            if term in joined:
                source: Any = term.args[0]
                low = source if low is None else _call(graph, place, aten.add.Tensor, (low, source))
                if term is not joined[-1]:
                    continue
                term = _call(graph, term, term.target, (low,), dict(term.kwargs))
            total = term if total is None else _call(graph, place, aten.add.Tensor, (total, term))
    assert total is not None
    gradient.replace_all_uses_with(total)
    return total


def _terms(node: Any) -> tuple[list[fx.Node], list[fx.Node]]:
    """The terms of a sum as the engine forms it, and its additions, one for each term but the first."""
    sums: list[fx.Node] = []
    while _is_addition(node):
        sums.append(node)
        node = node.args[0]
    sums.reverse()
    return [node, *(addition.args[1] for addition in sums)], sums  # type: ignore[list-item]


def _is_addition(node: Any) -> bool:
    return (
        isinstance(node, fx.Node)
        and node.target is aten.add.Tensor
        and not node.kwargs
        and all(isinstance(arg, fx.Node) for arg in node.args)
    )


def _call(
    graph: fx.Graph, like: fx.Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
) -> fx.Node:
    """A new call that counts as part of the module and line of another node."""
    node = graph.call_function(target, args, kwargs or {})
    values = fx.map_arg((args, kwargs or {}), lambda parent: parent.meta["val"])
    with like.meta["val"].fake_mode:
        node.meta = {**like.meta, "val": target(*values[0], **values[1])}
    return node


_PRODUCTS_INSIDE = frozenset(
    {
        aten._trilinear.default,  # torch.nn.Bilinear
        aten.linalg_matrix_exp.default,
        aten.linalg_pinv.atol_rtol_tensor,
    }
)


def cast_inside(graph: fx.Graph, tangents: Sequence[fx.Node], backward: State) -> None:
    """Run operators that call matrix products inside under the autocast that they have in eager.

    Under a dispatch mode a kernel's own calls are not cast, in eager neither.
    """
    after = depends_on(graph, tangents)
    for node in graph.nodes:
        if node.target not in _PRODUCTS_INSIDE:
            continue
        region = _region(node)
        state = backward if node in after else () if region is None else region.inside()
        if state:
            node.args = (state, node.target, *node.args)
            node.target = under_autocast
