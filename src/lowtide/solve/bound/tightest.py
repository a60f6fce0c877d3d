"""The best proven lower bound on the seconds of every schedule under a budget, in whatever order it runs.

Problem: a solver found a schedule; how much faster could any other one be?

Method: the largest of three bounds: from single moments of the step (see `method`), for small graphs from the
search over all orders of runs (see `all_orders`), and where `highspy` is installed from several moments
together, in whole numbers (see `several_moments`), if a single one has anything to say.

Complexity: some tenths of a second for graphs of some hundred ops, with several moments some seconds.

Limits: near the smallest peak of a larger graph it says little.
"""

from __future__ import annotations

from math import inf

from ...plans.graph import Graph
from .all_orders import bound_by_orders
from .method import bound_by_moments
from .several_moments import bound_by_programmes

__all__ = ["bound_at_moments", "lower_bound"]


def lower_bound(graph: Graph, budget: int) -> float:
    """Seconds that no schedule under the budget can beat; infinity when it is proven that none fits."""
    bound = bound_at_moments(graph, budget)
    return bound if bound == inf else max(bound, bound_by_orders(graph, budget))


def bound_at_moments(graph: Graph, budget: int) -> float:
    """What moments say, one alone and several together, without the search over all orders."""
    bound = bound_by_moments(graph, budget)
    if graph.seconds < bound < inf:
        bound = max(bound, bound_by_programmes(graph, budget))
    return bound
