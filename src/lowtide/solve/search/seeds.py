"""Plans of the other methods, as starting points for `auto`: so that it never loses to one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

from ...plans.graph import Graph
from ..bound.cut_orders import cut_orders
from ..chain.method import chain_orders
from ..rotor.method import rotor_orders, rotor_orders_at
from ..sequence.method import sequence_orders, smallest_orders
from ..sqrt_segments import segment_orders

__all__ = ["ask_at_budget", "seed_orders"]

MOST_OPS, MOST_SEQUENCES, MOST_RUNS = 10_000, 400, 250_000
"""Above `MOST_OPS` ops only segments and cuts are tried; of the many sequences about `MOST_RUNS` runs are
judged, more ops leaving fewer of `MOST_SEQUENCES`. Chosen, to keep the seeds a small part of planning."""

DENSITIES = ((1000, 12), (2000, 3), (MOST_OPS, 0))
"""How many plans of the dynamic programme over blocks to try for graphs of up to a number of ops. Chosen, for
time: its tables take a second at 1000 ops."""


def seed_orders(graph: Graph) -> Iterator[tuple[list[str], list[str]]]:
    """Orders of runs that do not depend on a budget."""
    ops = len(graph.ops)
    yield from segment_orders(graph)
    yield from cut_orders(graph)
    if ops > MOST_OPS:
        return
    yield from chain_orders(graph)
    if density := _density(ops):
        yield from rotor_orders(graph, density=density)
    # Every n-th of the sequences, so that about MOST_RUNS runs are simulated whatever the size.
    yield from islice(sequence_orders(graph), 0, None, max(ops * MOST_SEQUENCES // MOST_RUNS, 1))
    yield from smallest_orders(graph)


def ask_at_budget(graph: Graph, fits: Callable[[tuple[list[str], list[str]]], bool]) -> None:
    """Let the method whose table knows every memory look for a budget, by asking what fits it."""
    if _density(len(graph.ops)):
        rotor_orders_at(graph, fits)


def _density(ops: int) -> int:
    return next((density for most, density in DENSITIES if ops <= most), 0)
