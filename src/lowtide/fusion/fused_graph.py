"""From a graph of single ops to a graph of fused kernels, on which a compiled step is planned.

An element-wise op is computed inside the ops that read it (*inlined*) where nothing but loops read it and
reading what it reads costs no more than reading its result: such a value is never in memory. What is left
are the values that are: whatever a kernel of its own reads or writes, results of reductions, results of the
step, and the narrow places between (a sum of two tensors, say). A loop also computes a value anew that is in
memory, where it reads all that this takes anyway: that costs nothing, and nothing has to be kept for it.

Each op of the new graph writes what the last of its nodes writes and carries the others inside.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from ..capture.fx_nodes import has_effect
from ..capture.lift import Lifted
from ..capture.op_classes import fusing, is_realized, steers, type_of
from ..capture.rewrites.channels_last_inputs import is_channels_last_copy
from ..capture.trace import Trace
from ..plans.graph import Graph, Op, OpKind
from .kernel_windows import Group, Kernels
from .neighbours import moved_together
from .traffic import traffic

__all__ = ["fuse"]

_DRAWS = ("prims.inductor_random", "prims.inductor_randint")
# Chosen; benchmarks/constants.py halves and doubles them on ten steps of the zoo, under four budgets each.
_SMALL = 64
"""A value that is this many times smaller than the largest need not be realized: no plan moves with 32 or
128."""
_MUCH = 32
"""A loop that reads this many times what it writes writes little. With 16 predicted times change by at most
0.6 %, with 64 plans are up to 3 % slower and the smallest peak up to 2 % larger."""
_MOST_INSIDE = 48
"""Nodes in one expression: longer ones make kernels that are slow to compile. With 24 plans are 2 % slower (6
% at most), with 96 four of forty are up to 4 % faster and the others what they were."""


def fuse(trace: Trace, lifted: Lifted) -> Lifted:
    """The graph with inlined ops taken into their readers."""
    fused = _Fusing(trace, lifted).fused()
    # Which loops belong together shows only in the fused graph, so it is fused twice where some do.
    closer = moved_together(lifted, fused)
    return fused if closer is lifted else _Fusing(trace, closer).fused()


@dataclass
class _Expression:
    """What computes a value: the values that it reads, and the ops inside, in order."""

    reads: dict[str, None] = field(default_factory=dict)
    inside: dict[str, None] = field(default_factory=dict)


class _Fusing:
    def __init__(self, trace: Trace, lifted: Lifted) -> None:
        self.trace = trace
        self.lifted = lifted
        self.graph = lifted.graph
        self.size = {value.name: value.bytes for value in self.graph.values}
        self.how = {op.name: fusing(lifted.node_of[op.name]) for op in self.graph.ops}
        self.choices = {node.name for node in steers(trace.graph)}
        self.place = {op.name: index for index, op in enumerate(self.graph.ops)}
        self.readers = _readers(self.graph)
        self.kernels = Kernels(lifted, self.how)
        self.draws = {op.name for op in self.graph.ops if type_of(lifted.node_of[op.name]) in _DRAWS}
        self.expression: dict[str, _Expression] = {}
        self.inline: set[str] = set()

    def fused(self) -> Lifted:
        for op in self.graph.ops:
            self.expression[op.name] = self.express(op)
            if self.may_inline(op) and self.is_worth_it(op):
                self.inline.add(op.name)
        for op in self.graph.ops:
            # Ops alike run in its kernel: what they read is at hand for the reduction, too.
            if self.kernels.ends_kernel(op):
                self.take_in_what_is_free(self.expression[op.name], beside=self.kernels.alike(op))
        kernels = [self.kernel(op) for op in self.graph.ops if op.name not in self.inline]
        # An op that every reader computes for itself is left out first: it must not pull others up.
        ops = self.early(self.needed(kernels))
        written = {name for op in ops for name in op.writes}
        gone = {name for op in self.graph.ops for name in op.writes} - written
        values = tuple(value for value in self.graph.values if value.name not in gone)
        inside = {op.name: self.nodes_inside(op) for op in ops}
        graph = self.graph.replace(ops=tuple(ops), values=values)
        made = replace(self.lifted, graph=graph, inside=inside)
        return replace(made, traffic=traffic(made, self.how), kept=self.kept(ops))

    def express(self, op: Op) -> _Expression:
        """The op over values that are in memory; what it reads of inlined ops is computed inside."""
        made = _Expression()
        for name in op.reads:
            writer = self.graph.writer.get(name)
            if writer is not None and writer.name in self.inline:
                self.take_in(made, writer)
            else:
                made.reads[name] = None
        if self.how[op.name] != "apart":
            self.take_in_what_is_free(made)
        return made

    def take_in(self, made: _Expression, writer: Op) -> None:
        inner = self.expression[writer.name]
        made.reads.update(inner.reads)
        made.inside.update(inner.inside)
        made.inside[writer.name] = None

    def take_in_what_is_free(self, made: _Expression, *, beside: Iterable[Op] = ()) -> None:
        """Compute values in memory anew where all that this reads is read anyway, here or by ops beside."""
        others = {name for op in beside for name in self.expression[op.name].reads}
        for name in list(made.reads):
            there = {*others, *made.reads} - {name}
            inside = self.expression[self.graph.writer[name].name].inside if name in self.graph.writer else {}
            if self.is_free(name, there) and len(made.inside) + len(inside) < _MOST_INSIDE:
                del made.reads[name]
                self.take_in(made, self.graph.writer[name])

    def may_run_inside(self, op: Op) -> bool:
        """Whether an op is a loop that others can compute for themselves."""
        node = self.lifted.node_of[op.name]
        # An op with several outputs, or whose output is an item of a tuple, is no expression of a loop.
        alone = len(op.writes) == 1 and self.lifted.root_of[op.writes[0]] is node
        loop = self.how[op.name] == "loop" and not is_realized(node)
        return loop and alone and op.kind == "pure" and op.name not in self.choices

    def may_inline(self, op: Op) -> bool:
        """Whether an op may be computed inside whatever reads it."""
        if not self.may_run_inside(op) or op.workspace:
            return False
        (name,) = op.writes
        value = self.graph.value[name]
        readers = self.readers.get(name, [])
        # Outputs and gradients must be in memory whoever reads them.
        if value.kind != "activation" or value.held or not readers:
            return False
        fuses = all(self.how[reader.name] != "apart" for reader in readers)
        return fuses and (self.is_short(op) or self.is_narrowed(op) or self.is_padded(op))

    def is_short(self, op: Op) -> bool:
        return len(self.expression[op.name].inside) < _MOST_INSIDE // 2

    def is_narrowed(self, op: Op) -> bool:
        """Whether all that becomes of a value, close by, is smaller: a long expression is cut after that."""
        readers = self.readers[op.writes[0]]
        written = sum(self.size[name] for name in readers[0].writes)
        return len(readers) == 1 and not self.is_read_later(op) and written < self.size[op.writes[0]]

    def is_padded(self, op: Op) -> bool:
        """Whether all that becomes of a value, close by, is itself with zeros: the loop gets no longer."""
        nodes = [self.lifted.node_of[reader.name] for reader in self.readers[op.writes[0]]]
        return [type_of(node) for node in nodes] == ["aten.constant_pad_nd"] and not self.is_read_later(op)

    def is_worth_it(self, op: Op) -> bool:
        """Whether reading what an op reads costs no more than reading its result."""
        (name,) = op.writes
        readers = self.readers.get(name, [])
        near = not self.is_read_later(op)
        if near and len(readers) == 1:
            return not self.is_narrow(op, readers[0])
        if self.draws_inside(op):
            return False
        return self.is_made_of_less(op) or (near and self.inlined_traffic(op) <= self.written_traffic(op))

    def is_made_of_less(self, op: Op) -> bool:
        """Whether what an op reads is no larger than its result, so that it can be kept instead."""
        return sum(map(self.size.__getitem__, self.large_reads(op))) <= self.size[op.writes[0]]

    def draws_inside(self, op: Op) -> bool:
        """Whether a value is made of random numbers: it is worth keeping, since they are slow to draw."""
        return op.name not in self.draws and not self.draws.isdisjoint(self.expression[op.name].inside)

    def is_narrow(self, op: Op, reader: Op) -> bool:
        """Whether a value should be kept rather than a wider one that only it makes and others read later.

        Not where they can both be computed from something that is no larger.
        """
        name, wider = op.writes[0], reader.writes[0] if reader.writes else ""
        if not wider or not self.is_read_later(reader):
            return False
        if self.size[name] >= self.size[wider] - self.size[wider] // _MUCH:
            return False  # a matrix with a few zeros after its rows is not wider
        return self.draws_inside(op) or not self.is_short(op) or not self.is_made_of_less(op)

    def inlined_traffic(self, op: Op) -> int:
        """What the kernels that read an op's result read more when they compute it themselves."""
        return sum(self.read_for(op, group) for group in self.reading_groups(op))

    def written_traffic(self, op: Op) -> int:
        """What it takes to compute a result once, write it, and read it in each other kernel."""
        own = self.kernels.group[op.name]
        return self.read_for(op, own) + self.size[op.writes[0]] * len({own, *self.reading_groups(op)})

    def reading_groups(self, op: Op) -> set[Group]:
        return {self.kernels.group[reader.name] for reader in self.readers[op.writes[0]]}

    def read_for(self, op: Op, group: Group) -> int:
        """The bytes of an op's reads that a kernel neither reads anyway nor can compute from what it does."""
        there = self.read_in(group, op)
        missing = [name for name in self.large_reads(op) if name not in there]
        return sum(self.size[name] for name in missing if not self.is_free(name, there))

    def read_in(self, group: Group, but: Op) -> set[str]:
        """What the ops of a kernel read, one of them left out."""
        found: set[str] = set()
        for op in self.kernels.members[group]:
            for name in op.reads if op is not but else ():
                writer = self.graph.writer.get(name)
                if writer is not None and writer.name in self.inline:
                    found.update(self.expression[writer.name].reads)
                elif writer is not but:
                    found.add(name)
        return found

    def is_free(self, name: str, there: set[str]) -> bool:
        """Whether a kernel that reads some values can compute this one from them."""
        writer = self.graph.writer.get(name)
        if writer is None or not self.may_run_inside(writer):
            return False
        if self.draws_inside(writer):
            return False
        # Small reads (a mean per row, a scale) hardly cost anything and need not be there anyway.
        reads = self.large_reads(writer)
        return bool(reads) and there.issuperset(reads)

    def large_reads(self, op: Op) -> list[str]:
        """What an op's expression reads, without what is much smaller than its result."""
        written = self.size[op.writes[0]]
        return [name for name in self.expression[op.name].reads if self.size[name] * _MUCH > written]

    def needed(self, ops: list[Op]) -> list[Op]:
        """The ops without those that every reader now computes for itself."""
        read: set[str] = set()
        kept: list[Op] = []
        for op in reversed(ops):
            # From the end, so that an op whose only reader went is found to be idle, too.
            idle = op.kind == "pure" and all(self.graph.value[n].kind == "activation" for n in op.writes)
            if not idle or not read.isdisjoint(op.writes) or has_effect(self.lifted.node_of[op.name]):
                kept.append(op)
                read.update(op.reads)
        return kept[::-1]

    def early(self, ops: list[Op]) -> list[Op]:
        """The ops with each loop that writes little moved up, after what it reads: there it fuses."""
        followers: dict[str, list[Op]] = {}
        writer: dict[str, str] = {}
        place: dict[str, int] = {}
        for index, op in enumerate(ops):
            place[op.name] = index
            writers = [writer[name] for name in op.reads if name in writer]
            writer.update((name, op.name) for name in op.writes)
            last = max(writers, key=place.__getitem__, default="")
            # It stays in its phase: forward and backward are compiled apart.
            if last and self.writes_little(op) and self.graph.op[last].phase == op.phase:
                place[op.name] = place[last]
                followers.setdefault(last, []).append(op)
            else:
                followers.setdefault("", []).append(op)
        return [later for op in followers.get("", []) for later in _with_followers(op, followers)]

    def writes_little(self, op: Op) -> bool:
        read = max((self.size[name] for name in op.reads), default=0)
        written = sum(self.size[name] for name in op.writes)
        return self.how[op.name] != "apart" and op.kind == "pure" and _MUCH * written < read

    def kept(self, ops: list[Op]) -> frozenset[str]:
        """The ops whose results are realized when they run, so that what they read can go.

        Those are loops that write much, and products of much that are read later on: where one is added to
        something, Inductor would form it only there. A convolution it forms where it stands: there the
        operator would only make it copy the result to another layout.
        """
        large = max((self.size[name] for op in ops for name in op.writes), default=0) // _SMALL
        single = [op for op in ops if len(op.writes) == 1 and self.how[op.name] != "reduction"]
        return frozenset(op.name for op in single if self.is_kept(op, large))

    def is_kept(self, op: Op, large: int) -> bool:
        node = self.lifted.node_of[op.name]
        if type_of(node) == "aten.convolution" or is_channels_last_copy(node):
            return False
        if self.how[op.name] == "loop":
            return self.size[op.writes[0]] > large
        return self.is_read_later(op) and any(self.size[name] > large for name in (*op.reads, *op.writes))

    def is_read_later(self, op: Op) -> bool:
        """Whether some reader of what an op writes stands after a kernel of its own."""
        window = self.kernels.window
        return any(window[reader.name] != window[op.name] for reader in self.readers.get(op.writes[0], []))

    def kernel(self, op: Op) -> Op:
        made = self.expression[op.name]
        # A choice (an index, a rounding) that another kernel computes may come out differently: it runs once.
        pinned = op.kind != "pure" or op.name in self.choices
        reads = tuple(made.reads)
        kind: OpKind = "pinned" if pinned else "pure"
        return replace(op, reads=reads, kind=kind, state=0, takes=self.takes(op, reads))

    def takes(self, op: Op, reads: tuple[str, ...]) -> tuple[str, ...]:
        """The reads that a loop may overwrite: as large as its result, and of the same type."""
        if self.how[op.name] != "loop" or len(op.writes) != 1:
            return ()
        (written,) = op.writes
        alike = [name for name in reads if self.size[name] == self.size[written] > 0]
        alike = [name for name in alike if self.graph.value[name].droppable]
        return tuple(name for name in alike if self.dtype(name) == self.dtype(written))

    def dtype(self, value: str) -> torch.dtype:
        found: torch.dtype = self.lifted.root_of[value].meta["val"].dtype
        return found

    def nodes_inside(self, op: Op) -> tuple[fx.Node, ...]:
        """The nodes that an op computes besides its own, in the order of the graph."""
        inside = self.expression[op.name].inside
        return tuple(self.lifted.node_of[name] for name in sorted(inside, key=self.place.__getitem__))


def _with_followers(op: Op, followers: dict[str, list[Op]]) -> list[Op]:
    return [
        op,
        *(later for other in followers.get(op.name, ()) for later in _with_followers(other, followers)),
    ]


def _readers(graph: Graph) -> dict[str, list[Op]]:
    readers: dict[str, list[Op]] = {}
    for op in graph.ops:
        for name in op.reads:
            readers.setdefault(name, []).append(op)
    return readers
