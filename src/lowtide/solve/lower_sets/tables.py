r"""Numbers of a family of lower sets, as arrays: what the search over sequences looks up.

For each set, in order of size: its bytes and seconds, those of its boundary, and its tail (what the backward
holds beside a segment that ends there). For each pair L ⊂ L': the bytes and seconds of b(L') \ L. There may
be 3·10^8 such pairs, so only the *near* ones are stored. A set is a *cut* when it is comparable with every
set of the family (all others are inside it or contain it). Let C be the largest cut that shares no node with
b(L'): every L up to C is a subset of L' and b(L') \ L = b(L') for all of them, so those pairs need no entry;
they are *far*. On networks made of blocks the near pairs are those inside one block.

L ⊆ L' is tested by the few nodes that are ready to be added to L': a lower set that is no subset of L'
contains one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ...plans.patience import check_time
from .family import ForwardDag, TooManyLowerSets

__all__ = ["Bytes", "Near", "Seconds", "Tables", "tables"]

Bytes = NDArray[np.int64]
Seconds = NDArray[np.float64]
Flags = NDArray[np.bool_]
Number = TypeVar("Number", np.int64, np.float64)

PAIR_LIMIT = 30_000_000
FLAG_LIMIT = 1 << 28
"""Sets times nodes: a few tables of that many bytes are made. Chosen: 16 000 sets of 16 000 nodes."""


@dataclass(frozen=True)
class Near:
    """The near subsets of one set, with the bytes and seconds of its boundary outside of each."""

    sources: NDArray[np.int32]
    bytes: Bytes
    seconds: Seconds


@dataclass(frozen=True)
class Tables:
    """What the search looks up about each set of a family, in order of size.

    `span` is what a segment takes of each set's bytes, twice them in the paper: a segment from L to L' takes
    span(L') - span(L). `edges` are the boundaries; `far` holds the positions of cuts.
    """

    dag: ForwardDag
    sets: tuple[int, ...]
    edges: tuple[int, ...]
    span: Bytes
    seconds: Seconds
    edge_bytes: Bytes
    edge_seconds: Seconds
    tail: Bytes
    far: tuple[int, ...]
    near: tuple[Near, ...]

    @cached_property
    def position(self) -> dict[int, int]:
        """Where each set is in the order."""
        return {nodes: position for position, nodes in enumerate(self.sets)}


def tables(
    dag: ForwardDag,
    sets: Sequence[int],
    *,
    times: int = 2,
    progress: Callable[[float], None] | None = None,
) -> Tables:
    """The tables of a family that holds ∅ and V; raises `TooManyLowerSets` where the pairs are too many.

    A segment takes its bytes `times` times: twice in the paper, which counts a gradient for each activation.
    """
    ordered = sorted(set(sets), key=lambda nodes: (nodes.bit_count(), nodes))
    if len(ordered) * len(dag.before) > FLAG_LIMIT:
        raise TooManyLowerSets(
            f"{len(ordered)} lower sets of a forward graph of {len(dag.before)} nodes take too much memory; "
            'choose another method, as method="auto"'
        )
    inside = _inside(dag, ordered)
    edge, tail, ready = _neighbours(dag, inside)
    size = np.array(dag.bytes, dtype=np.int64)
    cost = np.array(dag.seconds, dtype=np.float64)
    far = _far(ordered, inside, edge)
    pairs = 0
    near: list[Near] = []
    for target in range(len(ordered)):
        check_time()
        near.append(_near(target, far[target] + 1, inside, edge, ready, size, cost))
        pairs += len(near[-1].sources)
        if pairs > PAIR_LIMIT:
            raise TooManyLowerSets(f"{len(ordered)} lower sets have more than {PAIR_LIMIT} near pairs")
        if progress is not None and target % 64 == 0:
            progress(target / len(ordered))
    return Tables(
        dag=dag,
        sets=tuple(ordered),
        edges=_as_sets(edge),
        span=times * _total(size, inside),
        seconds=_total(cost, inside),
        edge_bytes=_total(size, edge),
        edge_seconds=_total(cost, edge),
        tail=_total(size, tail[0]) + _total(size, tail[1]),
        far=far,
        near=tuple(near),
    )


def _total(weight: NDArray[Number], rows: Flags) -> NDArray[Number]:
    """The summed weight of the nodes of each set; one row per node."""
    total = np.zeros(rows.shape[1], dtype=weight.dtype)
    for node, row in enumerate(rows):
        total[row] += weight[node]
    return total


def _inside(dag: ForwardDag, ordered: Sequence[int]) -> Flags:
    """Whether each node (row) is in each set (column)."""
    width = (len(dag.before) + 7) // 8
    packed = np.frombuffer(b"".join(nodes.to_bytes(width, "little") for nodes in ordered), dtype=np.uint8)
    bits = np.unpackbits(packed.reshape(len(ordered), width), axis=1, bitorder="little")
    return np.ascontiguousarray(bits[:, : len(dag.before)].T).astype(np.bool_)


def _as_sets(rows: Flags) -> tuple[int, ...]:
    """The columns as sets of nodes."""
    packed = np.packbits(rows.T, axis=1, bitorder="little")
    return tuple(int.from_bytes(row.tobytes(), "little") for row in packed)


def _neighbours(dag: ForwardDag, inside: Flags) -> tuple[Flags, tuple[Flags, Flags], Flags]:
    """The boundary of each set; what it leads to and what else that needs; what is ready to be added."""
    edge, front, beside = (np.zeros_like(inside) for _ in range(3))
    ready = ~inside
    for node, sources in enumerate(dag.before):
        check_time()
        for source in sources:
            crossing = inside[source] & ~inside[node]
            edge[source] |= crossing
            front[node] |= crossing
            ready[node] &= inside[source]
    for node, sources in enumerate(dag.before):
        for source in sources:
            beside[source] |= front[node] & ~inside[source]
    return edge, (front, beside), ready


def _far(ordered: Sequence[int], inside: Flags, edge: Flags) -> tuple[int, ...]:
    """For each set, the position of the largest cut before it that shares no node with its boundary."""
    cuts = np.array(_cuts(ordered), dtype=np.int64)
    # Cuts are nested, so a node that is missing in n of them is in all but the first n.
    first = (~inside[:, cuts]).sum(axis=1)
    reach = np.searchsorted(cuts, np.arange(len(ordered)), side="left")
    for node, row in enumerate(edge):
        reach[row] = np.minimum(reach[row], first[node])
    return tuple(int(cuts[max(count - 1, 0)]) for count in reach)


def _cuts(ordered: Sequence[int]) -> list[int]:
    """The positions of the sets that are comparable with all others."""
    common = [ordered[-1]]
    for nodes in reversed(ordered[:-1]):
        common.append(common[-1] & nodes)
    common.reverse()
    union = 0
    cuts: list[int] = []
    for position, nodes in enumerate(ordered):
        union |= nodes
        if union == nodes == common[position]:
            cuts.append(position)
    return cuts


def _near(
    target: int, start: int, inside: Flags, edge: Flags, ready: Flags, size: Bytes, cost: Seconds
) -> Near:
    """The subsets of a set from a position on, with what its boundary has outside of each."""
    outside = inside[np.flatnonzero(ready[:, target]), start:target].any(axis=0)
    sources = (np.flatnonzero(~outside) + start).astype(np.int32)
    new_bytes = np.zeros(len(sources), dtype=np.int64)
    new_seconds = np.zeros(len(sources), dtype=np.float64)
    for node in np.flatnonzero(edge[:, target]) if len(sources) else ():
        missing = ~inside[node, sources]
        new_bytes[missing] += size[node]
        new_seconds[missing] += cost[node]
    return Near(sources, new_bytes, new_seconds)
