"""Rewrites of the joint graph, in place: so that it can be planned, and runs as fast as eager does.

Each is a small pass of its own over the fx graph; none changes what the step computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from ..._torch import private_of
from ..fx_nodes import depends_on, has_effect, is_mutation, mutations, storage_of, tensors_of
from .accumulate import is_accumulation
from .handing import is_handing
from .random_draws import is_drawn_in_backward, is_idle_draw
from .stepping import is_update

__all__ = [
    "conjugate_numbers",
    "drop_copies",
    "drop_idle_views",
    "keep_mutated_inputs",
    "look_anew",
    "look_through_views",
    "materialise_zeros",
    "prune_tangents",
    "remove_dead",
    "separate_tangents",
    "stack_selected",
]

aten = torch.ops.aten


def keep_mutated_inputs(graph: fx.Graph, primals: Sequence[fx.Node], tangents: Sequence[fx.Node]) -> None:
    """Clone an input before the forward overwrites it, where its old value may be needed afterwards.

    The backward must read the clone; forward readers do when it is small beside what they make, so that
    they may be recomputed. Other readers of an overwritten input run once.
    """
    backward = depends_on(graph, tangents)
    mutated = {node.args[0] for node in mutations(graph)}
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for primal in primals:
        readers = [user for user in primal.users if not is_mutation(user)]
        if primal not in mutated or not (
            any(user in backward for user in _all_readers(primal)) or _is_small(primal, readers)
        ):
            continue
        with graph.inserting_before(first):
            kept = graph.call_function(aten.clone.default, (primal,))
        with primal.meta["val"].fake_mode:
            kept.meta["val"] = torch.empty_like(primal.meta["val"])
        for reader in readers:
            # The writes go on to the input itself, as the user expects.
            reader.replace_input_with(primal, kept)
            look_anew(reader, primal.meta["val"])


def _all_readers(node: fx.Node) -> Iterator[fx.Node]:
    """What reads a node, or a view of it."""
    for user in node.users:
        if user.op == "call_function" and not is_mutation(user):
            yield user
            if {storage_of(t) for t in tensors_of(user)} & {storage_of(t) for t in tensors_of(node)}:
                yield from _all_readers(user)


def _is_small(primal: fx.Node, readers: Sequence[fx.Node]) -> bool:
    made = sum(t.numel() * t.element_size() for reader in readers for t in tensors_of(reader))
    # Chosen: a clone of a quarter of what it lets recompute is cheap (a counter, a running mean).
    return bool(made > 4 * primal.meta["val"].numel() * primal.meta["val"].element_size())


def look_anew(node: fx.Node, old: torch.Tensor) -> None:
    """Derive the fake tensors of a view anew, and of views of it, after what it looks at was replaced."""
    if node.op != "call_function" or all(storage_of(t) != storage_of(old) for t in tensors_of(node)):
        return
    _derive(node, old)
    for user in node.users:
        look_anew(user, old)


def look_through_views(graph: fx.Graph) -> None:
    """Let the fake tensor of every view share its source's storage, where a pass made it one of its own."""
    for node in graph.nodes:
        source = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
        if source is None or node.op != "call_function" or not _is_view(node):
            continue
        value = source.meta.get("val")
        if isinstance(value, torch.Tensor) and all(
            storage_of(t) != storage_of(value) for t in tensors_of(node)
        ):
            _derive(node, value)


def _derive(node: fx.Node, source: torch.Tensor) -> None:
    """Make a node's fake tensors from those of its arguments."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda parent: parent.meta["val"])
    with source.fake_mode:  # type: ignore[attr-defined]
        node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]


def _is_view(node: fx.Node) -> bool:
    """Whether an operator's schema says that it looks at its first argument and writes nothing."""
    schema = private_of(node.target, "schema", None)
    first = schema.arguments[0].alias_info if schema and schema.arguments else None
    return first is not None and not first.is_write


def separate_tangents(tangents: Sequence[fx.Node]) -> None:
    """Give each tangent a storage of its own, no larger than it needs.

    Those of views of one output are traced as views of one, which is as large as the whole output.
    """
    seen: set[int] = set()
    for node in tangents:
        old = node.meta["val"]
        with old.fake_mode:
            own = torch.empty_strided(old.shape, old.stride(), dtype=old.dtype, device=old.device)
        if storage_of(old) in seen or own.untyped_storage().nbytes() < old.untyped_storage().nbytes():
            node.meta["val"] = own
            for user in node.users:
                look_anew(user, old)
        seen.add(storage_of(node.meta["val"]))


def drop_idle_views(graph: fx.Graph) -> None:
    """Skip `detach` and `alias`, and a transpose of a transpose; results of the step keep theirs."""
    for node in list(graph.nodes):
        parent = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
        if parent is None or any(user.op == "output" for user in node.users):
            continue
        if node.target in (aten.detach.default, aten.alias.default):
            node.replace_all_uses_with(parent)
        elif node.target is aten.t.default and parent.target is aten.t.default:
            node.replace_all_uses_with(parent.args[0])  # type: ignore[arg-type]
        else:
            continue
        graph.erase_node(node)


def conjugate_numbers(graph: fx.Graph) -> None:
    """Write the conjugate of a Python number as a number: it would be a tensor at run time, and a copy."""
    for node in graph.find_nodes(op="call_function", target=aten._conj.default):
        number = node.args[0]
        if isinstance(number, complex) and all(user.op == "call_function" for user in node.users):
            for user in list(node.users):
                _write_in(user, node, number.conjugate())
            graph.erase_node(node)


def _write_in(user: fx.Node, node: fx.Node, number: complex) -> None:
    """Replace a node by a number in another's arguments."""
    user.args, user.kwargs = fx.map_arg(  # type: ignore[assignment]
        (user.args, user.kwargs), lambda argument: number if argument is node else argument
    )


_TAKES_ZEROS = (
    *(aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.mul.Scalar, aten.div.Scalar),
    *(aten.clone.default, aten.copy_.default, aten.dot.default, aten.vdot.default, aten.linalg_cross.default),
)
"""Operators with a kernel of their own for tensors of zeros that have no memory (2.11-2.13)."""


def materialise_zeros(graph: fx.Graph) -> None:
    """Make the zeros of forward-mode derivatives where an operator reads them, as torch would inside of it.

    There they would be in nobody's plan: one number, expanded, beside what the operator returns.
    """
    zeros = set(graph.find_nodes(op="call_function", target=aten._efficientzerotensor.default))
    for node in graph.nodes if zeros else ():
        given = [parent for parent in node.all_input_nodes if parent in zeros]
        if not given or node.op != "call_function":
            continue
        if {storage_of(t) for t in tensors_of(node)} & {storage_of(parent.meta["val"]) for parent in given}:
            zeros.add(node)
        elif node.target not in _TAKES_ZEROS:
            for parent in given:
                node.replace_input_with(parent, _expanded_zero(graph, node, parent.meta["val"]))


def _expanded_zero(graph: fx.Graph, reader: fx.Node, like: torch.Tensor) -> fx.Node:
    options: dict[str, Any] = {"dtype": like.dtype, "layout": like.layout, "device": like.device}
    with graph.inserting_before(reader):
        zero = graph.call_function(aten.zeros.default, ([],), options)
        wide = graph.call_function(aten.expand.default, (zero, list(like.shape)))
    with like.fake_mode:  # type: ignore[attr-defined]
        zero.meta = {**reader.meta, "val": torch.empty([], dtype=like.dtype, device=like.device)}
        wide.meta = {**reader.meta, "val": zero.meta["val"].expand(like.shape)}
    return wide


_SCATTERS = (aten.slice_scatter.default, aten.select_scatter.default)


def drop_copies(graph: fx.Graph) -> None:
    """Let scatters read the source of a functional `copy` directly.

    `copy(part, source)` has the values of the source, and `part`'s strides over a storage as large as the
    whole: writing half a tensor would cost two of them. A scatter does not care for strides.
    """
    for node in graph.find_nodes(op="call_function", target=aten.copy.default):
        whole, source = node.meta["val"], node.args[1]
        scattered = all(user.target in _SCATTERS and user.args[0] is not node for user in node.users)
        if not scattered or not isinstance(source, fx.Node) or source.meta["val"].dtype != whole.dtype:
            continue
        if source.meta["val"].shape != whole.shape:
            with graph.inserting_before(node):
                wide = graph.call_function(aten.expand.default, (source, list(whole.shape)))
            with whole.fake_mode:
                wide.meta = {**node.meta, "val": source.meta["val"].expand(whole.shape)}
            source = wide
        node.replace_all_uses_with(source)
        graph.erase_node(node)


def stack_selected(graph: fx.Graph) -> None:
    """Turn a sum of `select_backward` over all indices into one `stack`.

    torch.compile captures `q, k, v = x` as three selects, whose gradients are three zero-filled tensors and
    two sums; eager unbinds and stacks.
    """
    for node in reversed(list(graph.nodes)):
        # From the end, so that of a tree of sums the root is met first and replaced as a whole.
        if not _is_sum(node) or any(map(_is_sum, node.users)) or not node.meta["val"].is_contiguous():
            continue
        parts = _parts(_summands(node) or [])
        if parts is None:
            continue
        dim = parts.pop()
        with graph.inserting_before(node):
            stacked = graph.call_function(aten.stack.default, (parts, dim))
        stacked.meta = dict(node.meta)
        node.replace_all_uses_with(stacked)


def _parts(leaves: list[fx.Node]) -> list[Any] | None:
    """What the leaves select from, by index, and the dimension last; None where they are not all of it."""
    arguments: list[Any] = sorted((leaf.args for leaf in leaves), key=lambda args: args[3])  # type: ignore[arg-type,return-value]
    _, sizes, dim, _ = arguments[0]
    whole = [(sizes, dim, index) for index in range(sizes[dim])]
    if [tuple(args[1:]) for args in arguments] != whole:
        return None
    return [*(args[0] for args in arguments), dim]


def _is_sum(node: fx.Node) -> bool:
    return node.target is aten.add.Tensor and _summands(node) is not None


def _summands(node: Any) -> list[fx.Node] | None:
    """The `select_backward` nodes that a tree of sums is made of, or None where it has others."""
    if not isinstance(node, fx.Node):
        return None
    if node.target is aten.select_backward.default:
        return [node]
    if node.target is not aten.add.Tensor or len(node.args) != 2 or node.kwargs:
        return None
    left, right = (_summands(arg) for arg in node.args)
    return None if left is None or right is None else left + right


def prune_tangents(graph: fx.Graph, missing: Sequence[fx.Node], tangents: Sequence[fx.Node]) -> None:
    """Take out the gradients that do not come, as eager autograd does with undefined ones.

    A node all of whose gradients are missing has a missing gradient itself; a sum with a missing one is the
    other one, or a copy with the sum's strides; where a missing gradient meets others in any other node it is
    a zero.
    """
    if not missing:
        return
    backward = depends_on(graph, tangents)
    gone = set(missing)
    for node in list(graph.nodes):
        parents = [parent for parent in node.all_input_nodes if parent in backward]
        absent = [parent for parent in parents if parent in gone]
        if not absent or node.op == "output" or _takes_gradients(node):
            continue
        if len(absent) == len(parents):
            gone.add(node)
        elif (rest := _rest_of_sum(node, gone)) is not None:
            node.replace_all_uses_with(rest)
            backward.add(rest)  # a copy is new here, and what reads it has a gradient that comes
        else:
            for parent in absent:
                node.replace_input_with(parent, _zeros_before(graph, node, parent))
    for node in list(graph.nodes):
        if node.op == "output" or _takes_gradients(node):
            node.args = fx.map_arg(node.args, lambda parent: None if parent in gone else parent)
    for node in filter(is_accumulation, gone):
        graph.erase_node(node)
    look_through_views(graph)
    _leave_draws_out(graph, gone, backward)


def _takes_gradients(node: fx.Node) -> bool:
    """Whether a node takes a list of gradients, some of which may not come."""
    return is_handing(node) or is_update(node)


def _leave_draws_out(graph: fx.Graph, gone: set[fx.Node], backward: set[fx.Node]) -> None:
    """Erase what is drawn for gradients that do not come: the backward of that function does not run.

    Numbers that nobody reads are taken to be drawn for the gradient that is computed next.
    """
    kept: set[fx.Node] = set()
    comes = True
    for node in reversed(list(graph.nodes)):
        if node in backward:
            comes = node not in gone
        if comes and is_idle_draw(node):
            kept.add(node)
    remove_dead(graph)
    for node in reversed(list(graph.nodes)):
        if is_idle_draw(node) and is_drawn_in_backward(node) and node not in kept:
            graph.erase_node(node)


def _rest_of_sum(node: fx.Node, gone: set[fx.Node]) -> fx.Node | None:
    if node.target is not aten.add.Tensor or len(node.args) != 2 or node.kwargs:
        return None
    rest = [arg for arg in node.args if arg not in gone]
    if len(rest) != 1 or not isinstance(rest[0], fx.Node):
        return None
    whole, part = node.meta["val"], rest[0].meta["val"]
    if (whole.shape, whole.dtype) != (part.shape, part.dtype):  # one that broadcasts is more than its summand
        return None
    if whole.stride() == part.stride():
        return rest[0]
    return _contiguous_before(node, rest[0]) if whole.is_contiguous() else None


def _contiguous_before(node: fx.Node, rest: fx.Node) -> fx.Node:
    """A copy with the strides that a node has: what reads it was traced for these."""
    with node.graph.inserting_before(node):
        copied = node.graph.call_function(
            aten.clone.default, (rest,), {"memory_format": torch.contiguous_format}
        )
    copied.meta = dict(node.meta)
    return copied


def _zeros_before(graph: fx.Graph, node: fx.Node, like: fx.Node) -> fx.Node:
    value = like.meta["val"]
    with graph.inserting_before(node):
        zeros = graph.call_function(
            aten.full.default,
            (list(value.shape), 0),
            {"dtype": value.dtype, "device": value.device, "pin_memory": False},
        )
    with value.fake_mode:
        zeros.meta["val"] = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    return zeros


def remove_dead(graph: fx.Graph, *, compiled: bool = False) -> None:
    """Erase nodes that nothing reads, except those that write into inputs or draw random numbers.

    Numbers that a compiler draws do not depend on those that it drew before.
    """
    for node in reversed(list(graph.nodes)):
        if node.op not in ("call_function", "get_attr") or node.users or has_effect(node):
            continue
        # In eager a draw that nobody reads still moves the generator on, and with it every later mask.
        if compiled or not is_idle_draw(node):
            graph.erase_node(node)
