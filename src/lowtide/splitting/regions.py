"""Regions of a step that can run a chunk of rows at a time, found on its graph.

Problem: a matrix product with a wide result (the head of a language model, the first half of an MLP) is
followed by operators that treat each row by itself, up to a sum over rows or another product that is narrow
again; in the backward the same happens the other way round. All that lies between is as wide as the product,
and need never be in memory for all rows at once.

Method: from such a product the region grows over wide values, to what reads them and to what makes them, as
far as `rows` knows what an operator does with rows; what is narrow and lies between two of its nodes, in
the same half of the step, belongs to it as well (the maximum of each row in a softmax). A value is wide if it
has at least half of the product's numbers in a row, and more than the product's input.

Limits: a region whose wide values leave it, other than as results of the step, saves nothing and is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx

from ..capture.fx_nodes import is_item, storage_of, tensors_of, traced_in_backward
from ..capture.kernel_outputs import items_of
from ..capture.lift import module_path
from ..capture.op_classes import type_of
from ..capture.trace import Trace
from .rows.part import Outcome, Part
from .rows.rules import part_of
from .spans import Span, rows_in

__all__ = ["Region", "find_regions", "late_nodes", "region_of"]

LEAST_ROWS = 512
"""A region with fewer rows is not looked at: chunks of them would leave a device idle."""

_PRODUCTS = ("aten.mm", "aten.addmm")
_WIDER = 1.5
_WORTH = 2.0
"""The least ratio of the bytes that stay inside of a region to those of its wide results."""


@dataclass(frozen=True)
class Region:
    """Nodes that run a chunk of rows at a time: what each does with rows, and how wide the first one is.

    `bytes` are those of its values that need not be there for all rows at once.
    """

    seed: fx.Node
    rows: int
    parts: Mapping[fx.Node, Part]
    outcome: Mapping[fx.Node, Outcome]
    bytes: int

    @property
    def name(self) -> str:
        """What it is known by in this step."""
        return self.seed.name

    @property
    def module(self) -> str:
        """The module of its first product, by a name the user knows."""
        return module_path(self.seed) or self.seed.name

    @cached_property
    def kind(self) -> str:
        """What regions of repeated layers have in common."""
        return "; ".join(
            f"{type_of(node)} {[tuple(tensor.shape) for tensor in tensors_of(node)]}" for node in self.parts
        )


def find_regions(trace: Trace, *, least_rows: int = LEAST_ROWS) -> list[Region]:
    """The regions of a step, those first that would save the most; no node is in two."""
    seeds = [node for node in trace.graph.nodes if _is_seed(node, least_rows)]
    seeds.sort(key=lambda node: -node.meta["val"].numel())
    late = late_nodes(trace)
    taken: set[fx.Node] = set()
    found: list[Region] = []
    for seed in seeds:
        if seed in taken:
            continue
        region = _Growth(trace, seed, late, taken).region()
        if region is not None:
            taken.update(region.outcome)
            found.append(region)
    return sorted(found, key=lambda region: -region.bytes)


def region_of(trace: Trace, seed: str, late: set[fx.Node]) -> Region | None:
    """The region that grows from a product, by its name, if there is one; `late` as of `late_nodes`."""
    found = [node for node in trace.graph.nodes if node.name == seed]
    return _Growth(trace, found[0], late, set()).region() if found else None


def _is_seed(node: fx.Node, least_rows: int) -> bool:
    if node.op != "call_function" or type_of(node) not in _PRODUCTS or traced_in_backward(node):
        return False
    rows, width = node.meta["val"].shape
    left: Any = node.args[-2]
    return bool(rows >= least_rows and width >= _WIDER * left.meta["val"].shape[1])


def late_nodes(trace: Trace) -> set[fx.Node]:
    """The nodes that run in the backward."""
    tangent = trace.backward_nodes()
    return {node for node in trace.graph.nodes if node in tangent or traced_in_backward(node)}


class _Growth:
    """A region while it grows."""

    def __init__(self, trace: Trace, seed: fx.Node, late: set[fx.Node], taken: set[fx.Node]) -> None:
        self.trace, self.seed, self.late, self.taken = trace, seed, late, taken
        product = seed.meta["val"]
        self.rows, self.width = product.shape
        self.narrow = seed.args[-2].meta["val"].shape[1]  # type: ignore[union-attr]
        self.order = {node: place for place, node in enumerate(trace.graph.nodes)}
        self.results = {node for node in (*trace.outputs, *trace.gradients) if isinstance(node, fx.Node)}
        self.parts: dict[fx.Node, Part] = {}
        self.outcome: dict[fx.Node, Outcome] = {}
        self.refused: set[tuple[fx.Node, Span | None]] = set()

    def region(self) -> Region | None:
        if not self.add(self.seed, (0, 1)):
            return None
        self.grow([self.seed])
        self.fill()
        if not self.is_whole():
            return None
        inside, leaving = self.weigh()
        if inside < _WORTH * leaving or inside <= 0:
            return None
        order = self.order.__getitem__
        parts = {node: self.parts[node] for node in sorted(self.parts, key=order)}
        outcome = {node: self.outcome[node] for node in sorted(self.outcome, key=order)}
        return Region(self.seed, self.rows, parts, outcome, inside)

    def spans(self, node: fx.Node) -> dict[fx.Node, Span]:
        """Where rows are in the inputs of a node that are in the region."""
        found = {parent: self.outcome.get(parent) for parent in node.all_input_nodes}
        return {parent: span for parent, span in found.items() if isinstance(span, tuple)}

    def add(self, node: fx.Node, want: Span | None = None) -> bool:
        """Take a node into the region, if it is known what it does with rows."""
        if node in self.taken or node in self.parts or (node, want) in self.refused:
            return node in self.parts
        known = self.spans(node)
        part = part_of(node, known, want)
        if part is None or not self.agrees(node, part):
            self.refused.add((node, want))
            return False
        self.parts[node] = part
        outputs = part.outputs
        if isinstance(node.meta["val"], torch.Tensor):
            self.outcome[node] = outputs[0]
        else:
            self.outcome[node] = None
            for item in filter(is_item, node.users):
                self.outcome[item] = outputs[item.args[1]]  # type: ignore[index]
        return True

    def agrees(self, node: fx.Node, part: Part) -> bool:
        """Whether all that reads the rows of this node can do so, where it is in the region already."""
        counts = {rows_in(parent.meta["val"].shape, span) for parent, span in part.rows.items()}
        counts |= {
            rows_in(item.shape, out)
            for item, out in zip(items_of(node.meta["val"]), part.outputs, strict=True)
            if isinstance(out, tuple)
        }
        if counts != {self.rows}:
            return False
        return all(self.reads_so(user, node, part) for user in node.users if user in self.parts)

    def reads_so(self, user: fx.Node, node: fx.Node, part: Part) -> bool:
        outcome = part.outputs[0]
        expected = self.parts[user].rows.get(node)
        return expected == (outcome if isinstance(outcome, tuple) else None)

    def is_wide(self, node: fx.Node, span: Outcome) -> bool:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or not isinstance(span, tuple):
            return False
        width = value.numel() / self.rows
        return bool(width >= self.width / 2 and width > self.narrow)

    def grow(self, start: Iterable[fx.Node]) -> None:
        """Over wide values, to their readers and to what makes them."""
        waiting = list(start)
        while waiting:
            node = waiting.pop()
            found = self.around(node)
            waiting += found

    def around(self, node: fx.Node) -> list[fx.Node]:
        """What is new to the region beside a node of it."""
        new: list[fx.Node] = []
        before = set(self.outcome)
        for made in [node, *filter(is_item, node.users)]:
            if self.is_wide(made, self.outcome.get(made)):
                new += [user for user in made.users if user not in before and self.add(user)]
        for parent, span in self.parts[node].rows.items():
            if parent in before or not self.is_wide(parent, span):
                continue
            maker: Any = parent.args[0] if is_item(parent) else parent
            if maker.op == "call_function" and self.add(maker, span):
                new.append(maker)
        return new

    def fill(self) -> None:
        """Take in what lies between two nodes of the region, in the same half of the step."""
        for half in (False, True):
            mine = {node for node in self.outcome if (node in self.late) is half}
            nodes = [node for node in self.around_all(mine) if (node in self.late) is half]
            after = _reached(nodes, mine, lambda node: node.all_input_nodes)
            before = _reached(reversed(nodes), mine, lambda node: list(node.users))
            for node in nodes:
                if node in after and node in before and node not in self.outcome:
                    self.add(node)

    def around_all(self, mine: set[fx.Node]) -> Iterator[fx.Node]:
        """The nodes from the first one to the last one of some."""
        if mine:
            place = self.order.__getitem__
            node, last = min(mine, key=place), max(mine, key=place)
            yield node
            while node is not last:
                node = node.next
                yield node

    def is_whole(self) -> bool:
        """Whether each node that reads rows of the region does so row by row."""
        for node, part in self.parts.items():
            for parent in node.all_input_nodes:
                if part.rows.get(parent) != self.outcome.get(parent) and isinstance(
                    self.outcome.get(parent), tuple
                ):
                    return False
        return all(_can_be_joined(node) for node in self.leaving())

    def leaving(self) -> list[fx.Node]:
        """The nodes with rows that something outside of the region reads."""
        return [
            node
            for node, outcome in self.outcome.items()
            if isinstance(outcome, tuple)
            if node in self.results or any(user not in self.outcome for user in node.users)
        ]

    def weigh(self) -> tuple[int, int]:
        """The bytes of wide values that stay inside, and of those that leave, results of the step aside."""
        leaving = {
            node
            for node in self.leaving()
            if self.is_wide(node, self.outcome[node]) and any(user not in self.outcome for user in node.users)
        }
        wide = [node for node, span in self.outcome.items() if self.is_wide(node, span)]
        values = [node.meta["val"] for node in wide]
        storages = {storage_of(value): value.untyped_storage().nbytes() for value in values}
        gone = {storage_of(node.meta["val"]) for node in leaving}
        return (
            sum(size for key, size in storages.items() if key not in gone),
            sum(size for key, size in storages.items() if key in gone),
        )


def _reached(nodes: Iterable[fx.Node], start: set[fx.Node], neighbours: Any) -> set[fx.Node]:
    """The nodes that are reached from some by way of the others, in the order that is given."""
    found = set(start)
    for node in nodes:
        if any(other in found for other in neighbours(node)):
            found.add(node)
    return found


def _can_be_joined(node: fx.Node) -> bool:
    """Whether rows that are put together lie as the whole did."""
    value = node.meta["val"]
    return isinstance(value, torch.Tensor) and value.is_contiguous()
