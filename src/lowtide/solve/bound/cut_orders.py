"""Plans from the smallest cuts behind the bound: what to save across the end of the forward.

Problem: which values should wait across the end of the forward, if what is not saved is recomputed when
needed?

Method: at each price per byte the smallest cut of the moment (see `method`) says which ops are recomputed,
for the least seconds plus price times bytes. The prices where the answer changes are found by halving the
interval between two known cuts where their lines cross. Each op is recomputed right before the first run that
reads it. This is what the min-cut partitioner of torch.compile solves at one price, here at all of them and
judged by its peak.

Complexity: one smallest cut per plan, at most `CUTS` of them.

Limits: one moment and one more run per op. Seeds for `auto`, which mends what is above the budget elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...plans.graph import Graph
from ...plans.order import first_order, just_in_time
from ..waste import without_waste
from .method import CutNetwork
from .mincut import Cut
from .moments import RequiredOps, moments

__all__ = ["cut_orders"]

CUTS = 32


def cut_orders(graph: Graph) -> Iterator[tuple[list[str], list[str]]]:
    """The orders of runs of the smallest cuts, without repetition, from few recomputations to many."""
    step = RequiredOps(graph)
    if not step.once:
        return
    network = CutNetwork(step, next(moments(step)))
    forward, backward = first_order(graph)
    seen: set[tuple[str, ...]] = {()}
    for cut in _cuts(network):
        again = tuple(network.recomputed(cut))
        if again not in seen:
            seen.add(again)
            yield without_waste(graph, forward, just_in_time(graph, backward, again))


def _cuts(network: CutNetwork) -> list[Cut]:
    """The smallest cuts at rising prices per byte, found where the lines of known cuts cross."""
    dear = sum(network.seconds) + 1
    many = network.solve(dear)
    cuts = {dear: many}
    todo = [(network.line(network.solve(1)), network.line(many))]
    while todo and len(cuts) < CUTS:
        low, high = todo.pop(0)
        if low is None or high is None or low.bytes <= high.bytes:
            continue
        price = (high.seconds - low.seconds) // (low.bytes - high.bytes)
        cut = network.solve(price)
        middle = network.line(cut)
        if middle is None or middle.at(price) >= min(low.at(price), high.at(price)):
            continue
        cuts[price] = cut
        todo += [(low, middle), (middle, high)]
    return [cuts[price] for price in sorted(cuts)]
