"""Segments of the forward that are recomputed as a whole: common to `sqrt_segments` and `lower_sets`."""

from __future__ import annotations

from collections.abc import Sequence

from ..plans.graph import Graph

__all__ = ["backward_with_segments"]


def backward_with_segments(
    graph: Graph, first: tuple[list[str], list[str]], dropped: dict[str, int]
) -> list[str]:
    """The backward in which each segment is recomputed before something of it is first read.

    `first` is the order of first runs, `dropped` the segment of each value that is not kept.
    """
    segments: dict[int, list[str]] = {index: [] for index in dropped.values()}
    for name in first[0]:
        for index in {dropped[value] for value in graph.op[name].writes if value in dropped}:
            segments[index].append(name)
    needed = {value for name in first[1] for value in graph.op[name].reads if value in dropped}
    done: set[int] = set()
    order: list[str] = []
    for name in first[1]:
        first_needs = {dropped[value] for value in graph.op[name].reads if value in dropped} - done
        for index in sorted(first_needs):
            order.extend(_again(graph, segments[index], needed, dropped))
        done |= first_needs
        order.append(name)
    return order


def _again(graph: Graph, segment: Sequence[str], needed: set[str], dropped: dict[str, int]) -> list[str]:
    """The ops of a segment that write something needed, or what those read, in order."""
    wanted: set[str] = set()
    runs: list[str] = []
    for name in reversed(segment):
        op = graph.op[name]
        if any(value in needed or value in wanted for value in op.writes):
            runs.append(name)
            wanted.update(value for value in op.reads if value in dropped)
    return runs[::-1]
