"""The rewrite: a region of a trace becomes n copies of its nodes, each on a chunk of the rows.

A chunk's nodes stand together, so that a step that keeps nothing has one chunk in memory; what one half of
the step saves for the other is saved chunk by chunk, and the planner may keep or recompute each. Rows that
leave the region are put together, sums over rows are added up in at least single precision and rounded once.

Order: a phase (`phases.py`) runs all of its chunks before the next one begins. An edge of the new graph
always leads from a copy of one node to a copy of a node that reads it, so the new graph has no cycle if the
old one has none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from .._torch import private
from ..capture.fx_nodes import has_effect, is_item
from ..capture.rewrites.by_parts import (
    WRITES,
    add_part,
    add_product,
    adds_products,
    is_by_parts,
    put_rows,
    start_rows,
    start_total,
)
from ..capture.rewrites.common import look_anew
from ..capture.rewrites.random_draws import draws
from ..capture.trace import Trace
from ..errors import LowtideError
from .phases import nodes_around, phases_of
from .regions import Region
from .rows.part import Total
from .rows.sums import sum_dtype
from .spans import Span, chunk_size, merged_size

__all__ = ["CannotSplitError", "chunks_of", "copied", "unroll"]

aten = torch.ops.aten

_IN_PLACE = 2**16
"""Bytes from which on a sum is added to in place; below, plain ops can be recomputed like any other."""

_ALIGNED = 64
"""Rows of a chunk are a multiple of it where they are many: tiles of matrix products are."""


def chunks_of(rows: int, number: int) -> list[tuple[int, int]]:
    """The first and the last row of each chunk; the last one may be smaller."""
    each = -(-rows // number)
    if each > 4 * _ALIGNED:
        each = -(-each // _ALIGNED) * _ALIGNED
    return [(start, min(start + each, rows)) for start in range(0, rows, each)]


def copied(trace: Trace) -> Trace:
    """A trace with a graph of its own, whose nodes have the names of the old ones."""
    there: dict[fx.Node, fx.Node] = {}
    graph = fx.Graph()
    graph.output(graph.graph_copy(trace.graph, there))

    def moved(nodes: Any) -> Any:
        return [there.get(node, node) if isinstance(node, fx.Node) else node for node in nodes]

    return replace(
        trace,
        module=fx.GraphModule(trace.module, graph),
        primals=moved(trace.primals),
        tangents=moved(trace.tangents),
        outputs=moved(trace.outputs),
        gradients=moved(trace.gradients),
        expected=moved(trace.expected),
        mutated=set(moved(trace.mutated)),
        accumulating=moved(trace.accumulating),
        deferred=list(trace.deferred),
    )


def unroll(trace: Trace, region: Region, number: int, *, late: set[fx.Node], compiled: bool) -> None:
    """Run a region of this very trace in a number of chunks, in place.

    `late` are the nodes of the backward; new ones are added. What comes before the region's first node, and
    after its last one, stays where it is.
    """
    _Unrolling(trace, region, chunks_of(region.rows, number), late, compiled=compiled).run()


class _Unrolling:
    def __init__(
        self,
        trace: Trace,
        region: Region,
        chunks: list[tuple[int, int]],
        late: set[fx.Node],
        *,
        compiled: bool,
    ) -> None:
        self.trace, self.region, self.chunks, self.compiled = trace, region, chunks, compiled
        self.graph, self.late = trace.graph, late
        self.nodes = nodes_around(trace, region)
        self.phase = phases_of(self.nodes, region, late)
        self.copies: dict[tuple[fx.Node, int], fx.Node] = {}
        self.flat: dict[tuple[fx.Node, Span], fx.Node] = {}
        self.sums: dict[fx.Node, fx.Node] = {}
        self.joined: dict[fx.Node, fx.Node] = {}
        self.results = {node for node in (*trace.outputs, *trace.gradients) if isinstance(node, fx.Node)}
        self.outputs = {node for node in trace.outputs if isinstance(node, fx.Node)}
        self.place = region.seed
        self.mode = region.seed.meta["val"].fake_mode
        self.done: set[fx.Node | int] = set()
        self.outside = {node for node in self.nodes if node not in region.outcome}
        self.end = self.nodes[-1].next

    def run(self) -> None:
        last = {self.phase[node]: node for node in self.nodes if node in self.region.parts}
        order = dict.fromkeys(node for node in self.nodes if _keeps_its_turn(node))
        before = self.nodes[0].prev
        for node in self.nodes:
            if node in self.region.outcome:
                phase = self.phase[node]
                if last.get(phase) is node:
                    self.write_phase(phase)
            else:
                self.move(node)
        if [node for node in self.laid_out(before) if node in order] != [*order]:
            raise CannotSplitError(f"splitting {self.region.module} would change the order of random numbers")
        self.put_in_place()

    def laid_out(self, before: fx.Node) -> Iterator[fx.Node]:
        """The old nodes in the order that they have now."""
        node = before.next
        while node is not self.end:
            if node in self.done:
                yield node
            node = node.next

    def move(self, node: fx.Node) -> None:
        """Leave a node outside of the region where it is, after all that it reads."""
        if node in self.done or node not in self.outside:
            return
        self.done.add(node)
        self.need(node.all_input_nodes)
        self.end.prepend(node)

    def need(self, nodes: list[fx.Node]) -> None:
        for node in nodes:
            if node in self.region.outcome:
                self.write_phase(self.phase[node])
            else:
                self.move(node)

    def write_phase(self, phase: int) -> None:
        """All chunks of a phase, one after the other, and what they come to together."""
        if phase in self.done:
            return
        self.done.add(phase)
        nodes = [node for node in self.region.parts if self.phase[node] == phase]
        inside = {*nodes, *(item for node in nodes for item in node.users if is_item(item))}
        for node in nodes:
            self.need([parent for parent in node.all_input_nodes if parent not in inside])
        for index, bounds in enumerate(self.chunks):
            for node in nodes:
                self.place = node
                self.write(node, index, bounds)
        leaving = list(self.leaving(nodes))
        self.sums.update({node: self.finished(node) for node in leaving if node in self.sums})
        for node in leaving:
            self.join(node)

    def leaving(self, nodes: list[fx.Node]) -> Iterator[fx.Node]:
        for node in nodes:
            for made in (node, *filter(is_item, node.users)):
                if self.is_read_outside(made):
                    yield made

    def is_read_outside(self, node: fx.Node) -> bool:
        """Whether something reads a node as a whole."""
        if isinstance(self.region.outcome[node], Total):
            return bool(node.users) or node in self.results
        outside = any(user not in self.region.outcome for user in node.users)
        return outside or node in self.results

    # one node on one chunk

    def write(self, node: fx.Node, index: int, bounds: tuple[int, int]) -> None:
        part = self.region.parts[node]
        target, args, kwargs = part.call(bounds[1] - bounds[0])

        def here(parent: fx.Node) -> fx.Node:
            if parent in part.rows:
                return self.rows(parent, part.rows[parent], index, bounds)
            return self.whole(parent)

        args, kwargs = fx.map_arg((args, kwargs), here)
        outcome = part.outputs[0]
        if isinstance(outcome, Total) and outcome.product and self.adds_in_place(node):
            dtype = sum_dtype(node.meta["val"].dtype)
            if adds_products(args[0].meta["val"], dtype):
                self.start(node, args[0], dtype)
                self.call(add_product, self.sums[node], *args)
                return
        made = self.call(target, *args, **kwargs)
        self.copies[node, index] = made
        self.take_up(node, made, index, bounds)
        for item in filter(is_item, node.users):
            copy = self.call(item.target, made, item.args[1])
            self.copies[item, index] = copy
            self.take_up(item, copy, index, bounds)

    def take_up(self, node: fx.Node, made: fx.Node, index: int, bounds: tuple[int, int]) -> None:
        """Add what is summed over rows; put rows that leave the region into their place."""
        outcome = self.region.outcome[node]
        if isinstance(outcome, Total):
            if self.is_read_outside(node) or self.divides(node):
                self.add(node, made)
        elif isinstance(outcome, tuple) and self.is_read_outside(node) and self.joins_in_place(node):
            value = node.meta["val"]
            size = chunk_size(value.shape, outcome, self.region.rows)
            if node not in self.joined:
                self.joined[node] = self.call(start_rows, made, size, value.dtype)
            self.call(put_rows, self.joined[node], made, outcome[1] - 1, bounds[0])

    def rows(self, node: fx.Node, span: Span, index: int, bounds: tuple[int, int]) -> fx.Node:
        """A chunk of the rows of a node."""
        if (node, index) not in self.copies:
            size = list(node.meta["val"].shape)
            part = self.call(aten.slice.Tensor, self.flattened(node, span), span[0], *bounds)
            if span[1] - span[0] > 1:
                part = self.call(aten.view.default, part, chunk_size(size, span, bounds[1] - bounds[0]))
            self.copies[node, index] = part
        return self.copies[node, index]

    def flattened(self, node: fx.Node, span: Span) -> fx.Node:
        """A node with one dimension for its rows; it is copied where its strides do not allow that."""
        if span[1] - span[0] == 1:
            return node
        if (node, span) not in self.flat:
            value, size = node.meta["val"], merged_size(node.meta["val"].shape, span)
            source = node
            if not self.can_view(value, size):
                source = self.call(aten.clone.default, node, memory_format=torch.contiguous_format)
            self.flat[node, span] = self.call(aten.view.default, source, size)
        return self.flat[node, span]

    def can_view(self, value: torch.Tensor, size: list[int]) -> bool:
        try:
            with private("without_modes")(), torch.no_grad(), self.mode:
                value.view(size)
        except RuntimeError:
            return False
        return True

    def whole(self, node: fx.Node) -> fx.Node:
        """What every chunk reads: something outside of the region, or a sum over all chunks."""
        return self.joined.get(node, self.sums.get(node, node))

    # sums and rows of all chunks

    def adds_in_place(self, node: fx.Node) -> bool:
        value = node.meta["val"]
        return not self.compiled and node in self.late and value.numel() * value.element_size() >= _IN_PLACE

    def joins_in_place(self, node: fx.Node) -> bool:
        """Where rows are put into memory that waits for them: such an op runs once, so what it makes is kept.

        That is so for results of the step, and in the backward, which nothing recomputes.
        """
        return not self.compiled and (node in self.late or node in self.outputs)

    def start(self, node: fx.Node, after: fx.Node, dtype: torch.dtype) -> None:
        if node not in self.sums:
            self.sums[node] = self.call(start_total, after, list(node.meta["val"].shape), dtype)

    def add(self, node: fx.Node, part: fx.Node) -> None:
        dtype = sum_dtype(node.meta["val"].dtype)
        if self.adds_in_place(node):
            self.start(node, part, dtype)
            self.call(add_part, self.sums[node], part)
            return
        part = self.cast(part, dtype)
        self.sums[node] = self.call(aten.add.Tensor, self.sums[node], part) if node in self.sums else part

    def divides(self, node: fx.Node) -> bool:
        """Whether another sum is divided by this one."""
        if not is_item(node):
            return False
        source: Any = node.args[0]
        outputs = self.region.parts[source].outputs
        return any(isinstance(each, Total) and each.by == node.args[1] for each in outputs)

    def finished(self, node: fx.Node) -> fx.Node:
        """The sum of all chunks, divided where it is a mean, and rounded once."""
        total, outcome = self.sums[node], self.region.outcome[node]
        assert isinstance(outcome, Total)
        self.place = node
        if outcome.by is not None:
            source: Any = node.args[0]
            weights = next(item for item in source.users if is_item(item) and item.args[1] == outcome.by)
            total = self.call(aten.div.Tensor, total, self.sums[weights])
        elif outcome.over > 1:
            total = self.call(aten.div.Tensor, total, outcome.over)
        return self.cast(total, node.meta["val"].dtype)

    def cast(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        if node.meta["val"].dtype == dtype:
            return node
        if self.compiled:
            return self.call(torch.ops.prims.convert_element_type.default, node, dtype)
        return self.call(aten._to_copy.default, node, dtype=dtype)

    def join(self, node: fx.Node) -> None:
        """The rows of all chunks as one tensor, in the size that it had."""
        outcome = self.region.outcome[node]
        if not isinstance(outcome, tuple):
            return
        self.place = node
        size = list(node.meta["val"].shape)
        if node not in self.joined:
            parts = [self.copies[node, index] for index in range(len(self.chunks))]
            self.joined[node] = self.call(aten.cat.default, parts, outcome[1] - 1)
        if list(self.joined[node].meta["val"].shape) != size:
            self.joined[node] = self.call(aten.view.default, self.joined[node], size)

    def put_in_place(self) -> None:
        """Let what is outside read the new nodes, and take the old ones away."""
        new = {**self.sums, **self.joined}
        for node, by in new.items():
            outside = [user for user in node.users if user not in self.region.outcome]
            node.replace_all_uses_with(by, delete_user_cb=lambda user: user not in self.region.outcome)
            for user in outside:
                look_anew(user, node.meta["val"])
        for results in (self.trace.outputs, self.trace.gradients):
            results[:] = [new.get(node, node) if isinstance(node, fx.Node) else node for node in results]
        for node in reversed(self.nodes):
            if node in self.region.outcome:
                self.graph.erase_node(node)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A new call at the end, known by the module and line of the node whose place it takes."""
        with self.graph.inserting_before(self.end):
            node = self.graph.call_function(target, args, kwargs)
        kept = {key: value for key, value in self.place.meta.items() if key not in _OF_ONE_CALL}
        node.meta = {**kept, "val": self.derived(node)}
        if self.place in self.late:
            self.late.add(node)
        return node

    def derived(self, node: fx.Node) -> Any:
        """The fake tensors of a new call."""
        args: Any
        kwargs: Any
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda parent: parent.meta["val"])
        with private("without_modes")(), torch.no_grad(), self.mode:
            if node.target in WRITES:
                return args[0].new_empty(0)
            return node.target(*args, **kwargs)  # type: ignore[operator]


_OF_ONE_CALL = ("val", "tensor_meta", "eager_input_vals")
"""What the meta of a node says about its own arguments and results."""


class CannotSplitError(LowtideError):
    """A region that must stay as it is."""


def _keeps_its_turn(node: fx.Node) -> bool:
    """Whether a node draws random numbers or changes something: such nodes run in the order they have."""
    return node.op == "call_function" and not is_by_parts(node) and (has_effect(node) or draws(node))
