"""The planner that users get: how low, how fast, and what it promises about budgets."""

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphs import chain, cnn, random_graph, transformer
from lowtide.graph import Graph, Op, Value
from lowtide.simulate import simulate
from lowtide.solve import auto, keep_all, sqrt_segments
from lowtide.solve.order import first_order
from lowtide.solve.tape import Facts
from oracle import best_seconds

GRAPHS = {"cnn": cnn(6), "transformer": transformer(4), "chain": chain(24)}


def seconds(graph: Graph, budget: int) -> float:
    return simulate(graph, auto(graph, budget)).seconds


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 20))
def test_what_budget_zero_reaches_fits_and_more_budget_is_never_slower(seed, n):
    graph = random_graph(seed, n)
    least = simulate(graph, auto(graph, 0)).peak
    top = simulate(graph, keep_all(graph)).peak
    last = float("inf")
    for budget in sorted({least, least + 1, *(least + (top - least) * i // 7 for i in range(8))}):
        timeline = simulate(graph, auto(graph, budget))
        assert timeline.peak <= budget
        assert timeline.seconds <= last
        last = timeline.seconds


@pytest.mark.parametrize("name", GRAPHS)
def test_it_is_at_least_as_good_as_segments(name):
    graph = GRAPHS[name]
    segments = simulate(graph, sqrt_segments(graph, 0))
    assert simulate(graph, auto(graph, 0)).peak <= segments.peak
    assert seconds(graph, segments.peak) <= segments.seconds


@pytest.mark.parametrize("name", ["cnn", "transformer"])
def test_it_goes_down_to_the_largest_single_step(name):
    graph = GRAPHS[name]
    facts = Facts(graph)
    floor = facts.floor(facts.order(*first_order(graph)))
    # In a residual block the gradient of the skip waits next to the largest step.
    assert simulate(graph, auto(graph, 0)).peak <= 1.25 * floor


def test_the_same_graph_gets_the_same_plan():
    first, second = transformer(3), transformer(3).replace(prices="again")
    budget = simulate(first, keep_all(first)).peak * 3 // 5
    assert auto(first, budget) == auto(second, budget)


@cache
def reversal(steps: int, slots: int) -> float:
    """Forward runs to reverse a chain with its input and so many more values kept: the binomial optimum."""
    if steps <= 1:
        return 0
    if slots == 0:
        return steps * (steps - 1) / 2
    return min(part + reversal(steps - part, slots - 1) + reversal(part, slots) for part in range(1, steps))


@pytest.mark.parametrize("slots", [1, 2, 3, 4, 6])
def test_chains_are_close_to_the_optimal_multi_level_schedule(slots):
    graph = chain(24)
    # The input, the output and three values of the running step; the rest is for checkpoints.
    timeline = simulate(graph, auto(graph, 5 + slots))
    assert timeline.peak <= 5 + slots
    assert timeline.again <= 1.1 * (reversal(24, slots) - 23)


def tiny(seed: int) -> Graph:
    graph = random_graph(seed, 2 + seed % 2, special=seed % 4 < 2)
    ops = [Op(o.name, o.reads, o.writes, o.seconds, o.workspace, o.phase, _certain(o)) for o in graph.ops]
    return graph.replace(ops=tuple(ops))


def _certain(op: Op) -> str:
    return "pure" if op.kind == "random" else op.kind


def test_tiny_graphs_get_the_optimum():
    found = best = 0.0
    for seed in range(24):
        graph = tiny(seed)
        top = simulate(graph, keep_all(graph))
        least = simulate(graph, auto(graph, 0)).peak
        for budget in {least, (least + top.peak) // 2}:
            optimum = best_seconds(graph, budget)
            assert optimum is not None
            assert seconds(graph, budget) >= optimum - 1e-9
            found += seconds(graph, budget) - top.seconds
            best += optimum - top.seconds
    assert best > 0
    assert found <= 1.02 * best


def test_no_tiny_graph_has_a_much_smaller_peak_than_is_found():
    for seed in range(24):
        graph = tiny(seed)
        least = simulate(graph, auto(graph, 0)).peak
        assert best_seconds(graph, int(least * 0.9) - 1) is None


def test_tangents_that_nobody_reads_or_that_somebody_holds():
    graph = random_graph(3, 12)
    extra = (Value("unread", 7, "tangent"), Value("held", 5, "tangent", held=True))
    graph = graph.replace(values=(*graph.values, *extra))
    timeline = simulate(graph, auto(graph, 0))
    assert timeline.peak < simulate(graph, keep_all(graph)).peak
