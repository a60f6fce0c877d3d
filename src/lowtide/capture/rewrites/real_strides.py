"""A trace as the kernels run it: with the strides, sizes and aliases that they really return.

Tracing runs every operator on fake tensors, and some foretell other strides than the kernel returns. What
was traced as a view of such a result is a copy at run time, for which the plan has no bytes; or the other way
round. So the graph is walked once, in order: where it is known what a kernel returns, and that is not what
was foretold, the fake tensors are made anew and so are those of all that depends on them. A view that is no
longer possible becomes a view of a copy, which the planner can then drop or recompute like any other value; a
copy that eager would not make becomes a view.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ..._torch import private
from ..fx_nodes import is_item, read_by, tensors_of
from ..kernel_outputs import Output, Outputs, as_foretold, items_of, lazily, outputs_of

__all__ = ["settle"]

aten = torch.ops.aten

Look = Callable[[fx.Node], Outputs | None]
"""What is known of the outputs of an op, given the fake tensors that it reads."""


def settle(graph: fx.Graph, look: Look) -> None:
    """Correct the fake tensors of a graph where kernels return others, and the views that depend on them."""
    _Settling(graph, look).run()


class _Settling:
    def __init__(self, graph: fx.Graph, look: Look) -> None:
        self.graph = graph
        self.look = look
        self.changed: set[fx.Node] = set()
        self.copies: dict[fx.Node, fx.Node] = {}

    def run(self) -> None:
        for node in list(self.graph.nodes):
            if node.op != "call_function":
                continue
            # First what follows from new inputs, then what the kernel says of these: it is asked by its
            # inputs' strides.
            if any(parent in self.changed for parent in node.all_input_nodes):
                self.follow(node)
            if not is_item(node):
                self.correct(node)

    def follow(self, node: fx.Node) -> None:
        """Derive a node's fake tensors anew after those that it reads were replaced."""
        source = node.args[0] if node.args else None
        if is_item(node):
            self.put(node, source.meta["val"][node.args[1]])  # type: ignore[union-attr,index]
        elif node.target is aten.view.default and not _can_view(source, node.args[1]):
            node.replace_input_with(source, self.copy_of(source, node))  # type: ignore[arg-type]
            self.put(node, _derived(node))
        else:
            self.put(node, _derived(node))
            if node.target is aten.clone.default and node.kwargs == {
                "memory_format": torch.contiguous_format
            }:
                self.look_past(node)

    def put(self, node: fx.Node, value: Any) -> None:
        """Take new fake tensors for a node, unless they lie as the old ones did and look at nothing new."""
        if value is None or len(items_of(value)) != len(items_of(node.meta.get("val"))):
            return  # it would not run on fake tensors alone: what was traced stays
        outputs = outputs_of(value, read_by(node))
        views = any(output is not None and output.shares is not None for output in outputs)
        if views or not as_foretold(outputs, node.meta["val"], read_by(node)):
            node.meta["val"] = value
            self.changed.add(node)

    def look_past(self, copy: fx.Node) -> None:
        """Do without a contiguous copy that was traced for want of strides that are there, as eager does.

        `reshape` is traced as a copy and a view of it, `contiguous` as a copy.
        """
        source: Any = copy.args[0]
        for user in list(copy.users):
            if user.target is aten._unsafe_view.default and _can_view(source, user.args[1]):
                user.target, user.args = aten.view.default, (source, user.args[1])
            elif user.op == "call_function" and source.meta["val"].is_contiguous():
                user.replace_input_with(copy, source)

    def copy_of(self, source: fx.Node, reader: fx.Node) -> fx.Node:
        """The contiguous copy that `reshape` makes of a node; one for all of its readers."""
        if source not in self.copies:
            with self.graph.inserting_before(reader):
                copy = self.graph.call_function(
                    aten.clone.default, (source,), {"memory_format": torch.contiguous_format}
                )
            copy.meta = {**reader.meta, "val": None}
            copy.meta["val"] = _derived(copy)
            self.copies[source] = copy
            self.correct(copy)
        return self.copies[source]

    def correct(self, node: fx.Node) -> None:
        """Give a node the fake tensors that its kernel returns, where that is known."""
        value = node.meta.get("val")
        known = self.look(node) if tensors_of(node) else None
        reads = read_by(node)
        if known is None or len(known) != len(items_of(value)) or as_foretold(known, value, reads):
            return
        laid: list[Any] = []
        for fake, output in zip(items_of(value), known, strict=True):
            laid.append(_laid(fake, output, reads, laid))
        node.meta["val"] = type(value)(laid) if isinstance(value, list | tuple) else laid[0]
        self.changed.add(node)


def _can_view(source: Any, shape: Any) -> bool:
    """Whether a node can be viewed in a shape; asked of a tensor without data, which says so quietly."""
    fake = source.meta["val"]
    with private("without_modes")():
        try:
            torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device="meta").view(shape)
        except (RuntimeError, ValueError):
            return False
    return True


def _derived(node: fx.Node) -> Any:
    """What a node gives on the fake tensors of its arguments; None where it does not run on them."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda parent: parent.meta["val"])
    mode = next(tensor.fake_mode for tensor in read_by(node))  # type: ignore[attr-defined]
    try:
        with mode:
            return node.target(*args, **kwargs)  # type: ignore[operator]
    except (RuntimeError, TypeError, ValueError, NotImplementedError, AssertionError):
        return None


def _laid(fake: Any, output: Output | None, reads: list[torch.Tensor], made: list[Any]) -> Any:
    """A fake tensor that lies as an output does, in a storage of its own or in the one it shares."""
    if not isinstance(fake, torch.Tensor) or output is None:
        return None if output is None else fake
    stride = output.stride if len(output.stride) == fake.dim() else tuple(fake.stride())
    with fake.fake_mode:  # type: ignore[attr-defined]
        if output.shares is None:
            size = output.bytes // fake.element_size()
            base = torch.empty(size, dtype=fake.dtype, device=fake.device)
        else:
            base = reads[output.shares] if output.shares >= 0 else made[-output.shares - 1]
        if base.dtype != fake.dtype:
            return fake
        try:
            return lazily(base.as_strided(fake.shape, stride, output.offset), output.lazy)
        except RuntimeError:  # it does not fit into what was said of it
            return fake
