"""A quick look at a budget is a plan, and close to what `auto` finds."""

import pytest

from graphs import chain, random_graph, transformer
from lowtide.plans.keep_all import keep_all
from lowtide.plans.simulator import simulate
from lowtide.solve.auto import auto
from lowtide.solve.quick import quick, smallest
from lowtide.solve.search.tape import Facts


def judged(graph, rung):
    timeline = simulate(graph, Facts(graph).schedule(rung.order.tolist()))
    assert (timeline.peak, timeline.seconds) == (rung.peak, pytest.approx(rung.seconds))
    return timeline


@pytest.mark.slow
@pytest.mark.parametrize("graph", [chain(12), transformer(1), random_graph(3, 12)])
def test_a_quick_look_is_nearly_as_good_as_a_search(graph):
    whole = simulate(graph, keep_all(graph)).peak
    least = simulate(graph, auto(graph, 0)).peak
    assert judged(graph, quick(graph, whole)).seconds == pytest.approx(graph.seconds)
    assert judged(graph, smallest(graph)).peak <= 1.1 * least
    for budget in ((whole + least) // 2, whole - 1):
        found = judged(graph, quick(graph, budget))
        assert found.peak <= budget
        assert found.seconds <= 1.05 * simulate(graph, auto(graph, budget)).seconds


def test_what_does_not_fit_is_as_small_as_was_found():
    graph = chain(12)
    assert judged(graph, quick(graph, 0)).peak < simulate(graph, keep_all(graph)).peak
