r"""Lower sets of a forward graph: how to list them, and what a sequence of them costs.

A `ForwardDag` holds the intermediates of a forward: what each is computed from, its bytes and its seconds. A
set L of nodes is a *lower set* when everything its nodes are computed from is in it. Its *boundary* b(L) is
the part of L that something outside of L reads. Kusumoto et al. 2019 cut the forward along an increasing
sequence of lower sets ∅ = L_0 ⊂ L_1 ⊂ ... ⊂ L_k = V: with V_i = L_i \ L_(i-1) the segments and
U_i = b(L_1) ∪ ... ∪ b(L_i) what is cached, going through segment i takes

    M(U_(i-1)) + 2 M(V_i) + M(d+(L_i) \ L_i) + M(d-(d+(L_i)) \ L_i)    bytes

(d+ and d- are out- and in-neighbours), and what is not cached is recomputed: T(V_i \ b(L_i)) seconds of each
segment but the last, whose values are still there when its backward begins.

Sets are Python integers, bit v standing for node v, so unions, differences and subset tests are single
operations on machine words. Listing all lower sets adds one ready node at a time, O(sets · width); there may
be exponentially many, so the list has a limit. The approximate family has one set per node, its ancestors
and itself, besides ∅ and V.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from ...errors import LowtideError

__all__ = [
    "ForwardDag",
    "TooManyLowerSets",
    "all_lower_sets",
    "ancestor_closures",
    "boundary",
    "members",
    "sequence_bytes",
    "sequence_overhead",
]


class TooManyLowerSets(LowtideError):  # noqa: N818  # named like the other errors here
    """A graph has more lower sets, or more pairs of them, than it was allowed."""


@dataclass(frozen=True)
class ForwardDag:
    """The intermediates of a forward in the order they are computed: `before[v]` names earlier nodes only."""

    before: tuple[tuple[int, ...], ...]
    bytes: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not len(self.before) == len(self.bytes) == len(self.seconds):
            raise LowtideError(
                f"a forward graph needs as many bytes and seconds as nodes, but there are {len(self.bytes)} "
                f"and {len(self.seconds)} for {len(self.before)} nodes"
            )
        for node, sources in enumerate(self.before):
            if any(not 0 <= source < node for source in sources):
                raise LowtideError(f"node {node} is computed from {list(sources)}: name earlier nodes only")
            if self.bytes[node] < 0 or self.seconds[node] < 0:
                raise LowtideError(f"node {node} has negative bytes or seconds")

    @property
    def everything(self) -> int:
        """The set of all nodes."""
        return (1 << len(self.before)) - 1

    @cached_property
    def before_set(self) -> tuple[int, ...]:
        """The set of nodes that each node is computed from."""
        return tuple(sum(1 << source for source in set(sources)) for sources in self.before)

    @cached_property
    def after(self) -> tuple[tuple[int, ...], ...]:
        """The nodes that are computed from each node."""
        after: list[list[int]] = [[] for _ in self.before]
        for node, sources in enumerate(self.before):
            for source in sorted(set(sources)):
                after[source].append(node)
        return tuple(map(tuple, after))

    @cached_property
    def after_set(self) -> tuple[int, ...]:
        """The set of nodes that are computed from each node."""
        return tuple(sum(1 << node for node in nodes) for nodes in self.after)

    def total_bytes(self, nodes: int) -> int:
        """M(S): the bytes of a set of nodes."""
        return sum(self.bytes[node] for node in members(nodes))

    def total_seconds(self, nodes: int) -> float:
        """T(S): the seconds of a set of nodes."""
        return sum(self.seconds[node] for node in members(nodes))


def members(nodes: int) -> Iterator[int]:
    """The nodes of a set, in order."""
    while nodes:
        lowest = nodes & -nodes
        yield lowest.bit_length() - 1
        nodes ^= lowest


def all_lower_sets(dag: ForwardDag, *, limit: int = 100_000) -> list[int]:
    """Every lower set from ∅ to V, smaller ones first; raises `TooManyLowerSets` beyond the limit."""
    level = {0: sum(1 << node for node, sources in enumerate(dag.before) if not sources)}
    found: list[int] = []
    while level:
        found.extend(sorted(level))
        if len(found) > limit:
            raise TooManyLowerSets(
                f"the forward graph of {len(dag.before)} nodes has more than {limit} lower sets; "
                "raise the limit or use the approximate family"
            )
        level = dict(_grown(dag, level))
    return found


def _grown(dag: ForwardDag, level: dict[int, int]) -> Iterator[tuple[int, int]]:
    """The lower sets with one node more, each with the nodes that are ready to be added to it."""
    seen: set[int] = set()
    for nodes, ready in level.items():
        for node in members(ready):
            grown = nodes | 1 << node
            if grown not in seen:
                seen.add(grown)
                new = sum(1 << next_ for next_ in dag.after[node] if not dag.before_set[next_] & ~grown)
                yield grown, ready ^ (1 << node) | new


def ancestor_closures(dag: ForwardDag) -> list[int]:
    """The approximate family: ∅, V and each node with all its ancestors, smaller sets first."""
    closures: list[int] = []
    for node, sources in enumerate(dag.before):
        closure = 1 << node
        for source in sources:
            closure |= closures[source]
        closures.append(closure)
    return sorted({0, dag.everything, *closures}, key=lambda nodes: (nodes.bit_count(), nodes))


def boundary(dag: ForwardDag, lower: int) -> int:
    """b(L): the nodes of a lower set that something outside of it reads."""
    return sum(1 << node for node in members(lower) if dag.after_set[node] & ~lower)


def sequence_bytes(dag: ForwardDag, sequence: Sequence[int]) -> int:
    """The paper's peak of an increasing sequence of lower sets that ends with V (∅ is left out)."""
    peak, cached, last = 0, 0, 0
    for lower in sequence:
        front = _union(dag.after_set[node] for node in members(lower)) & ~lower
        beside = _union(dag.before_set[node] for node in members(front)) & ~lower
        own = 2 * dag.total_bytes(lower & ~last)
        tail = dag.total_bytes(front) + dag.total_bytes(beside)
        peak = max(peak, dag.total_bytes(cached) + own + tail)
        cached |= boundary(dag, lower)
        last = lower
    return peak


def sequence_overhead(dag: ForwardDag, sequence: Sequence[int]) -> float:
    """The seconds of recomputation; the last segment has none."""
    overhead, last = 0.0, 0
    for lower in sequence[:-1]:
        overhead += dag.total_seconds(lower & ~last & ~boundary(dag, lower))
        last = lower
    return overhead


def _union(sets: Iterator[int]) -> int:
    union = 0
    for nodes in sets:
        union |= nodes
    return union
