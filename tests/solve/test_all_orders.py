"""The bound of small graphs: the optimum over all orders, and never above any schedule."""

from dataclasses import replace
from math import inf

import pytest

from any_order_oracle import tiny_cases
from graphs import chain, random_graph
from lowtide.plans.graph import Graph, Op, Value
from lowtide.plans.keep_all import keep_all
from lowtide.plans.schedule import Run, Schedule
from lowtide.plans.simulator import simulate
from lowtide.solve import auto
from lowtide.solve.bound import lower_bound
from lowtide.solve.bound.all_orders import bound_by_orders
from lowtide.solve.bound.method import bound_by_moments
from lowtide.solve.search import any_order
from lowtide.solve.search.native import library
from short_search import short_search

pytestmark = pytest.mark.skipif(library() is None, reason="there is no C compiler here")
ROUNDING = 1 + 1e-9


@pytest.mark.slow
def test_it_is_the_optimum_over_all_orders():
    closer = nothing_fits = 0
    for seed, graph, budget, best in tiny_cases(60):
        assert bound_by_orders(graph, budget) == pytest.approx(inf if best is None else best), seed
        closer += best is not None and bound_by_moments(graph, budget) * ROUNDING < best
        nothing_fits += best is None
    assert closer > 5
    assert nothing_fits > 20


@pytest.mark.slow
def test_it_is_never_above_a_schedule_with_random_and_pinned_ops():
    above = 0
    for seed in range(12):
        graph = random_graph(seed, 4 + seed % 9, takes=seed % 3 == 0)
        top = simulate(graph, keep_all(graph))
        for share in (40, 60, 80):
            with short_search():  # any schedule will do
                found = simulate(graph, auto(graph, top.peak * share // 100))
            bound = lower_bound(graph, found.peak)
            assert top.seconds <= bound * ROUNDING
            assert bound <= found.seconds * ROUNDING
            above += bound > top.seconds * ROUNDING
    assert above > 5


def test_it_sees_what_is_recomputed_several_times():
    graph = chain(12)
    top = simulate(graph, keep_all(graph))
    budget = top.peak - 5
    best = simulate(graph, auto(graph, budget)).seconds
    assert bound_by_moments(graph, budget) < best
    assert lower_bound(graph, budget) == pytest.approx(best)


def test_it_holds_where_the_work_runs_out(monkeypatch):
    graph = chain(12)
    budget = simulate(graph, keep_all(graph)).peak - 5
    whole = bound_by_orders(graph, budget)
    monkeypatch.setattr("lowtide.solve.bound.all_orders.WORK", 50)
    assert graph.seconds < bound_by_orders(graph, budget) < whole


def test_a_gradient_may_be_written_in_the_forward():
    # Whoever writes it in the backward has to keep `a`, or to recompute it.
    ops = (
        Op("make", ("x",), ("a",), 1.0),
        Op("early", ("a",), ("g",), 1.0),
        Op("out", ("a",), ("y",), 1.0),
        Op("late", ("t", "y"), ("h",), 1.0, workspace=8, phase="backward"),
    )
    sizes = {"x": 1, "a": 8, "g": 1, "y": 1, "t": 1, "h": 1}
    kinds = {"x": "input", "g": "gradient", "y": "output", "t": "tangent", "h": "gradient"}
    graph = Graph(ops, tuple(Value(n, size, kinds.get(n, "activation")) for n, size in sizes.items()))
    forward = Run("make"), Run("early"), Run("out")
    early = simulate(graph, Schedule(forward, (Run("late"),)))
    assert lower_bound(graph, early.peak) == early.seconds == 4.0


def test_pinned_ops_run_once():
    ops = (
        Op("noise", ("x",), ("n",), 1.0, kind="pinned"),
        Op("wide", ("n",), ("w",), 1.0),
        Op("out", ("w",), ("y",), 1.0),
        Op("grad", ("n", "t"), ("g",), 1.0, phase="backward"),
    )
    sizes = {"x": 1, "n": 6, "w": 10, "y": 1, "t": 1, "g": 1}
    kinds = {"x": "input", "y": "output", "t": "tangent", "g": "gradient"}
    graph = Graph(ops, tuple(Value(n, size, kinds.get(n, "activation")) for n, size in sizes.items()))
    assert bound_by_orders(graph, 18) == 4.0
    assert bound_by_orders(graph, 17) == inf


def test_steps_as_long_as_a_graph_may_say_have_a_bound():
    short = chain(6)
    long = short.replace(ops=tuple(replace(op, seconds=5e17 / len(short.ops)) for op in short.ops))
    budget = simulate(long, keep_all(long)).peak - 2
    assert lower_bound(long, budget) == bound_by_moments(long, budget) > bound_by_orders(long, budget)


def test_larger_graphs_and_python_alone_are_left_to_the_moments(monkeypatch):
    large = chain(40)
    budget = simulate(large, keep_all(large)).peak - 5
    assert bound_by_orders(large, budget) == large.seconds
    assert lower_bound(large, budget) == bound_by_moments(large, budget) > large.seconds
    small = chain(6)
    monkeypatch.setattr(any_order, "library", lambda: None)
    assert bound_by_orders(small, budget) == small.seconds
