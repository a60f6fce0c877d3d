"""Graphs of more bytes than sums over their runs have bits for, counted in larger units.

The search adds up bytes over runs (the excess, an area), in 64 bits. A graph may have up to 2^60 bytes, more
than any device: one of more than 2^44 is searched with its sizes in units of a power of two, rounded up. A
plan that fits in units fits in bytes, and no sum of up to (ops + 1)^2 runs wraps around. Smaller graphs are
searched as they are.
"""

from __future__ import annotations

from dataclasses import replace

from ...plans.graph import Graph
from .ladder import Rung

__all__ = ["in_bytes", "in_units"]

EXACT_BITS = 44
"""16 TiB, in which 2^18 runs add up to fewer than 2^62; no step of one device comes near."""

LEAST_BITS, SUM_BITS = 24, 62


def in_units(graph: Graph) -> tuple[Graph, int]:
    """The graph to search and the bytes of its unit."""
    bits = graph.all_bytes.bit_length()
    if bits <= EXACT_BITS:
        return graph, 1
    kept = SUM_BITS - 2 * (len(graph.ops) + 1).bit_length()
    unit = 1 << (bits - min(max(kept, LEAST_BITS), EXACT_BITS))

    def count(size: int) -> int:
        return -(-size // unit)

    ops = tuple(replace(op, workspace=count(op.workspace), state=count(op.state)) for op in graph.ops)
    values = tuple(replace(value, bytes=count(value.bytes)) for value in graph.values)
    fixed = {name: count(size) for name, size in graph.fixed.items()}
    return graph.replace(ops=ops, values=values, fixed=fixed, boundary=count(graph.boundary)), unit


def in_bytes(rung: Rung, unit: int) -> Rung:
    """A rung of the graph that was searched, with its peak in bytes."""
    return rung if unit == 1 else replace(rung, peak=rung.peak * unit)
