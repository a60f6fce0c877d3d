"""The forward of a captured step as the graph of intermediates that lower sets are taken of.

A captured forward has ops that are no intermediates in the sense of the paper. They are contracted, so that
the number of lower sets stays near that of a network drawn by hand:

- A value that one op alone reads in the forward and that the backward does not read goes with its reader:
  a normalisation with its ReLU, the pieces of a rotary embedding with their result. It is never cached.
- An op that nothing in the forward reads (a second loss, statistics) goes with what it reads last.
- Small values made from given values alone (masks, frequency tables, counters) are left out: they are kept.
- Where asked, runs of nodes that only lead to each other become one node.

A node's bytes are those of its values that something outside of it reads and that may be dropped. All in
O(ops + reads + writes).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ...plans.graph import Graph
from .family import ForwardDag

__all__ = ["Contraction", "contract"]

SMALL, ALL_SMALL = 1 / 2000, 1 / 100
"""The share of the forward's bytes up to which what is made from given values alone is simply kept, and the
share of all of that: a forward of thousands of equal ops is made of nothing else. Chosen."""


@dataclass(frozen=True)
class Contraction:
    """The graph of intermediates, and the ops of each node in the order of the forward."""

    dag: ForwardDag
    ops: tuple[tuple[str, ...], ...]


def contract(
    graph: Graph, forward: Sequence[str], backward: Sequence[str], *, runs: bool = False
) -> Contraction:
    """The intermediates of a forward; with `runs`, chains of nodes between forks and joins become one."""
    work = _Contracting(graph, forward, backward)
    work.leave_out_small()
    work.join_transients()
    work.join_leaves()
    if runs:
        work.join_runs()
    return work.result()


class _Contracting:
    """Ops under contraction: `home[op]` is the op that stands for its node."""

    def __init__(self, graph: Graph, forward: Sequence[str], backward: Sequence[str]) -> None:
        self.graph, self.forward = graph, forward
        self.place = {name: place for place, name in enumerate(forward)}
        self.home = {name: name for name in forward}
        self.saved = {value for name in backward for value in graph.op[name].reads}
        self.readers: dict[str, list[str]] = {name: [] for name in forward}
        self.sources: dict[str, list[str]] = {name: [] for name in forward}
        for name in forward:
            for value in graph.op[name].reads:
                writer = graph.writer.get(value)
                if writer is not None:
                    self.readers[writer.name].append(name)
                    self.sources[name].append(writer.name)
        total = sum(self.size(graph.op[name].writes) for name in forward)
        self.small, self.all_small = int(total * SMALL), int(total * ALL_SMALL)

    def size(self, values: Iterable[str]) -> int:
        found = (self.graph.value[value] for value in values)
        return sum(value.bytes for value in found if value.droppable)

    def leave_out_small(self) -> None:
        left = self.all_small
        for name in self.forward:
            op = self.graph.op[name]
            loose = not self.sources[name] and not self.readers[name]
            given = all(source not in self.home for source in self.sources[name])
            size = self.size(op.writes)
            if loose or (given and size <= min(self.small, left)):
                left -= 0 if loose else size
                del self.home[name]

    def join_transients(self) -> None:
        joined: Counter[str] = Counter()
        for name in reversed([name for name in self.forward if name in self.home]):
            homes = {self.home[reader] for reader in self.readers[name] if reader in self.home}
            saved = self.size(value for value in self.graph.op[name].writes if value in self.saved)
            if len(homes) == 1 and joined[home := homes.pop()] + saved <= self.small:
                self.home[name] = home
                joined[home] += saved

    def join_leaves(self) -> None:
        kept = [name for name in self.forward if name in self.home]
        members: dict[str, list[str]] = {}
        for name in kept:
            members.setdefault(self.find(name), []).append(name)
        for name in reversed(kept[:-1]):
            if self.home[name] == name and not any(reader in self.home for reader in self.readers[name]):
                # What goes with it reads, too: no node may be computed from a later one.
                read = (source for member in members[name] for source in self.sources[member])
                homes = {self.find(source) for source in read if source in self.home}
                if homes - {name}:
                    self.home[name] = home = max(homes - {name}, key=self.place.__getitem__)
                    members[home] += members[name]

    def join_runs(self) -> None:
        after: dict[str, set[str]] = {}
        before: dict[str, set[str]] = {}
        for source, target in self.edges():
            after.setdefault(source, set()).add(target)
            before.setdefault(target, set()).add(source)
        for source in sorted(after, key=self.place.__getitem__, reverse=True):
            (target, *more) = after[source]
            if not more and len(before[target]) == 1:
                self.home[source] = target

    def find(self, name: str) -> str:
        while self.home[name] != name:
            name = self.home[name]
        return name

    def edges(self) -> set[tuple[str, str]]:
        pairs = {
            (self.find(source), self.find(name))
            for name in self.home
            for source in self.sources[name]
            if source in self.home
        }
        return {(source, target) for source, target in pairs if source != target}

    def result(self) -> Contraction:
        """The nodes in the order of the ops that stand for them."""
        homes = sorted({self.find(name) for name in self.home}, key=self.place.__getitem__)
        number = {home: node for node, home in enumerate(homes)}
        ops: list[list[str]] = [[] for _ in homes]
        for name in self.forward:
            if name in self.home:
                ops[number[self.find(name)]].append(name)
        before: list[set[int]] = [set() for _ in homes]
        for source, target in self.edges():
            before[number[target]].add(number[source])
        dag = ForwardDag(
            before=tuple(tuple(sorted(sources)) for sources in before),
            bytes=tuple(self.live_bytes(names) for names in ops),
            seconds=tuple(sum(self.graph.op[name].seconds for name in names) for names in ops),
        )
        return Contraction(dag, tuple(map(tuple, ops)))

    def live_bytes(self, names: Sequence[str]) -> int:
        """The bytes of a node's values that something outside of it reads."""
        own = set(names)
        read = {
            value
            for name in names
            for reader in self.readers[name]
            if reader not in own
            for value in self.graph.op[reader].reads
        }
        return self.size(
            value
            for name in names
            for value in self.graph.op[name].writes
            if value in read or value in self.saved
        )
