"""The programme of several moments stays below the optimum of tiny graphs, in whatever order they run."""

import pytest

pytest.importorskip("highspy")

from any_order_oracle import best_in_any_order, tiny_graph
from bound_moments import Programme, tightest
from graphs import with_takes
from lowtide.plans.keep_all import keep_all
from lowtide.plans.simulator import simulate
from lowtide.solve.bound.method import bound_by_moments
from lowtide.solve.bound.moments import RequiredOps


@pytest.mark.slow
@pytest.mark.parametrize("takes", [False, True])
def test_several_moments_are_never_above_the_optimum(takes):
    tried = closer = 0
    for seed in range(24):
        graph = with_takes(tiny_graph(seed), seed) if takes else tiny_graph(seed)
        top = simulate(graph, keep_all(graph))
        for share in (95, 85):
            budget = top.peak * share // 100
            best = best_in_any_order(graph, budget)
            if best is None:
                continue
            step = RequiredOps(graph)
            proven = Programme(step, budget, tightest(step, budget, 9)).least(10.0, whole=True).mip_dual_bound
            assert proven <= best / top.seconds + 1e-6, (seed, share)
            tried += 1
            closer += proven * top.seconds > bound_by_moments(graph, budget) * (1 + 1e-6)
    assert tried > 8
    assert closer > 0
