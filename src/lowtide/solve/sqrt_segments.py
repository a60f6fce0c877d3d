"""Segments: the baseline that everyone cites.

Problem: spend about one more forward to hold O(√n) instead of O(n) activations.

Method: Chen, Xu, Zhang, Guestrin, "Training Deep Nets with Sublinear Memory Cost" (2016). Cut the forward
into segments. Keep what crosses a cut and drop what lies inside a segment; when the backward first needs
something of a segment, run the segment's ops again in order. The last segment is kept whole: its backward
comes first. On a captured graph the paper's rule of thumb becomes a small search: several numbers of
segments around √n, cut either by bytes written or by ops, each cut moved to where the fewest bytes cross it
nearby; every candidate is scored by the simulator, after each drop has moved up to behind the last use.

Complexity: O(candidates · (steps + reads + writes)), with at most `COUNTS` numbers of segments.

Limits: one level of recomputation. Pinned ops are kept and never run again. Nothing that the backward list
runs for the first time is run twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import sqrt

from ..graph import Graph
from ..schedule import Schedule
from ..simulate import simulate
from .order import first_order, with_drops
from .stages import crossing_bytes

__all__ = ["segment_orders", "sqrt_segments"]

COUNTS = 10


def sqrt_segments(graph: Graph, budget: int) -> Schedule:
    """The fastest of the segmented schedules that fit, or the one with the smallest peak when none does."""
    schedules = [with_drops(graph, *order) for order in segment_orders(graph)]
    judged = [(simulate(graph, schedule), schedule) for schedule in schedules]
    fitting = [pair for pair in judged if pair[0].peak <= budget]
    if fitting:
        return min(fitting, key=lambda pair: (pair[0].seconds, pair[0].peak))[1]
    return min(judged, key=lambda pair: (pair[0].peak, pair[0].seconds))[1]


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
                yield forward, _with_segments(graph, forward, backward, cuts)


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
        middle = next((index for index, done in enumerate(sums) if done >= goal), len(sums)) + 1
        first = max(middle - reach, cuts[-1] + 1 if cuts else 1)
        near = range(first, min(middle + reach + 1, len(weights)))
        if near:
            cuts.append(min(near, key=lambda index: (crossing[index], abs(index - middle))))
    return cuts


def _with_segments(
    graph: Graph, forward: Sequence[str], backward: Sequence[str], cuts: Sequence[int]
) -> list[str]:
    """The backward in which each segment but the last runs again before something of it is first read."""
    bounds = [0, *cuts]
    segments = [list(forward[start:end]) for start, end in zip(bounds, cuts, strict=False)]
    segment_of = {name: index for index, names in enumerate(segments) for name in names}
    needed = {value for name in backward for value in graph.op[name].reads}
    inside = _inside(graph, forward, segment_of)
    done: set[int] = set()
    order: list[str] = []
    for name in backward:
        first_needs = {inside[value] for value in graph.op[name].reads if value in inside} - done
        for index in sorted(first_needs):
            order.extend(_again(graph, segments[index], needed, inside))
        done |= first_needs
        order.append(name)
    return order


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


def _again(graph: Graph, segment: Sequence[str], needed: set[str], inside: dict[str, int]) -> list[str]:
    """The ops of a segment that its backward needs again, in order."""
    wanted = {value for name in segment for value in graph.op[name].writes if value in needed}
    runs: list[str] = []
    for name in reversed(segment):
        op = graph.op[name]
        if any(value in wanted and value in inside for value in op.writes):
            runs.append(name)
            wanted.update(op.reads)
    return runs[::-1]
