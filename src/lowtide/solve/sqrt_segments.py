"""Segments: activation checkpointing as everyone cites it.

Problem: spend about one more forward to hold O(√n) instead of O(n) activations.

Method: Chen, Xu, Zhang, Guestrin, "Training Deep Nets with Sublinear Memory Cost" (2016). Cut the forward
into segments. Keep what crosses a cut and drop what lies inside a segment; when the backward first needs
something of a segment, recompute the segment's ops in order. The last segment is kept whole: its backward
comes first. On a captured graph the paper's rule of thumb becomes a small search: several numbers of
segments around √n, cut either by bytes written or by ops, each cut moved to where the fewest bytes cross it
nearby; every candidate is scored by the simulator, once each drop has moved up to its value's last use.

Complexity: O(candidates · (steps + reads + writes)), with at most `COUNTS` numbers of segments.

Limits: one level of recomputation. What pinned ops write is kept and never recomputed. Nothing that the
backward list runs for the first time is run twice.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import sqrt

from ..plans.graph import Graph
from ..plans.order import first_order
from ..plans.schedule import Schedule
from .best import best_schedule
from .chain_stages import crossing_bytes
from .segments import backward_with_segments

__all__ = ["segment_orders", "sqrt_segments"]

COUNTS = 10


def sqrt_segments(graph: Graph, budget: int) -> Schedule:
    """The fastest of the segmented schedules that fit, or the one with the smallest peak when none does."""
    return best_schedule(graph, segment_orders(graph), budget)


def segment_orders(graph: Graph) -> Iterator[tuple[list[str], list[str]]]:
    """The orders of runs of all candidates; the first has one segment, which is keeping everything."""
    forward, backward = first_order(graph)
    yield forward, backward
    crossing = crossing_bytes(graph, forward)
    by_bytes = [float(sum(graph.value[v].bytes for v in graph.op[name].writes)) for name in forward]
    seen: set[tuple[int, ...]] = {()}
    for count in _counts(len(forward)) if forward else ():
        for weights in (by_bytes, [1.0] * len(forward)):
            cuts = tuple(_cuts(weights, crossing, count))
            if cuts not in seen:
                seen.add(cuts)
                dropped = _dropped(graph, forward, cuts)
                yield forward, backward_with_segments(graph, (forward, backward), dropped)


def _counts(ops: int) -> list[int]:
    """Numbers of segments around √n, denser at the small end."""
    root = sqrt(max(ops, 1))
    low, high = 2.0, min(3 * root, ops)
    steps = [low * (max(high, low) / low) ** (index / (COUNTS - 1)) for index in range(COUNTS)]
    return sorted({round(step) for step in [*steps, root] if step >= low})


def _cuts(weights: Sequence[float], crossing: Sequence[int], count: int) -> list[int]:
    """Where to cut into segments of equal weight, each cut moved to the cheapest place nearby."""
    sums = list(accumulate(weights))
    reach = max(len(weights) // (3 * count), 1)
    cuts: list[int] = []
    for part in range(1, count):
        goal = sums[-1] * part / count
        middle = bisect_left(sums, goal) + 1
        first = max(middle - reach, cuts[-1] + 1 if cuts else 1)
        near = range(first, min(middle + reach + 1, len(weights)))
        if near:
            cuts.append(min(near, key=lambda index: (crossing[index], abs(index - middle))))
    return cuts


def _dropped(graph: Graph, forward: Sequence[str], cuts: Sequence[int]) -> dict[str, int]:
    """The segment of each value that is dropped; the last segment is kept whole."""
    bounds = zip([0, *cuts], cuts, strict=False)
    segments = {name: index for index, (start, end) in enumerate(bounds) for name in forward[start:end]}
    return _inside(graph, forward, segments)


def _inside(graph: Graph, forward: Sequence[str], segment_of: dict[str, int]) -> dict[str, int]:
    """The segment of each value that is dropped: written and read in one segment only."""
    inside = {
        value: segment
        for name, segment in segment_of.items()
        for value in graph.op[name].writes
        if graph.op[name].kind != "pinned" and graph.value[value].droppable
    }
    for name in forward:
        for value in graph.op[name].reads:
            if value in inside and inside[value] != segment_of.get(name):
                del inside[value]
    return inside
