"""The bound from single moments against exhaustive search over all orders, and every schedule of a solver."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations, pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from any_order_oracle import best_in_any_order, tiny_graph
from graphs import Step, chain, cnn, random_graph, transformer, with_takes
from lowtide.plans.graph import Graph, Op, Value
from lowtide.plans.keep_all import keep_all
from lowtide.plans.simulator import simulate
from lowtide.solve import METHODS, auto, sqrt_segments
from lowtide.solve.bound import moments
from lowtide.solve.bound.method import bound_by_moments
from lowtide.solve.bound.mincut import SINK, SOURCE, Network
from short_search import short_search

seeds = st.integers(0, 10_000)
ROUNDING = 1 + 1e-9


@pytest.mark.slow
def test_with_writes_in_place_never_above_the_optimum_over_all_orders():
    tried = equal = rerun = proven = helped = 0
    for seed in range(60):
        graph = with_takes(tiny_graph(seed), seed)
        plain = graph.replace(ops=tuple(replace(op, takes=()) for op in graph.ops))
        top = simulate(graph, keep_all(graph))
        for share in (95, 85):
            budget = top.peak * share // 100
            bound, best = bound_by_moments(graph, budget), best_in_any_order(graph, budget)
            proven += best is None and bound == math.inf
            if best is not None:
                assert top.seconds <= bound <= best * ROUNDING, (seed, budget)
                tried += 1
                equal += bound == pytest.approx(best)
                rerun += best > top.seconds
                helped += bound_by_moments(plain, budget) > best * ROUNDING
    assert tried > 20
    assert rerun > 10
    assert proven > 30
    assert equal > tried // 2
    assert helped > 3  # there the bound of the same graph without takes would be wrong


@pytest.mark.slow
def test_never_above_the_optimum_over_all_orders_and_infinite_only_where_nothing_fits():
    tried = equal = proven = rerun = 0
    for seed in range(40):
        graph = tiny_graph(seed)
        top = simulate(graph, keep_all(graph))
        for share in (95, 88, 80):
            budget = top.peak * share // 100
            bound, best = bound_by_moments(graph, budget), best_in_any_order(graph, budget)
            tried += best is not None
            proven += best is None and bound == math.inf
            if best is not None:
                assert top.seconds <= bound <= best * ROUNDING, (seed, budget)
                equal += bound == pytest.approx(best)
                rerun += best > top.seconds
    # The bound is not only valid but says something: it is often the optimum itself.
    assert tried > 30
    assert rerun > 20
    assert proven > 60
    assert equal > tried // 2


builders = st.one_of(
    st.builds(random_graph, seeds, st.integers(1, 10)),
    st.builds(random_graph, seeds, st.integers(1, 10), takes=st.just(True)),
    st.builds(with_takes, st.builds(cnn, st.integers(1, 2)), seeds),
    st.builds(chain, st.integers(2, 20)),
    st.builds(cnn, st.integers(1, 2)),
    st.builds(transformer, st.integers(1, 2)),
)


@pytest.mark.slow
@settings(max_examples=20)
@given(builders, st.floats(0.2, 1.0))
def test_never_above_a_schedule_at_its_own_peak(graph, share):
    top = simulate(graph, keep_all(graph))
    for solver in (auto, sqrt_segments):
        with short_search():  # any schedule will do
            found = simulate(graph, solver(graph, int(top.peak * share)))
        assert top.seconds <= bound_by_moments(graph, found.peak) <= found.seconds * ROUNDING


@pytest.mark.slow
@pytest.mark.parametrize("method", sorted(METHODS))
def test_with_writes_in_place_no_method_beats_the_bound(method):
    if method == "exact":
        pytest.importorskip("highspy")
    for seed in (0, 1, 2, 3, 5) if method == "exact" else range(6):  # the fifth takes longer than all others
        graph = random_graph(seed, 4 + seed, takes=True)
        top = simulate(graph, keep_all(graph)).peak
        for share in (0, 70, 90):
            with short_search():
                found = simulate(graph, METHODS[method](graph, top * share // 100))
            assert bound_by_moments(graph, found.peak) <= found.seconds * ROUNDING


@pytest.mark.slow
@settings(max_examples=25)
@given(builders)
def test_never_grows_with_the_budget(graph):
    top = simulate(graph, keep_all(graph)).peak
    bounds = [bound_by_moments(graph, top * share // 20) for share in range(21)]
    for small, large in pairwise(bounds):
        assert small * ROUNDING >= large
    assert bounds[-1] == simulate(graph, keep_all(graph)).seconds


def test_a_chain_keeps_every_other_step():
    # 9 steps of one byte: x, the output and two bytes to run a step are always there. Each byte that is
    # lacking at the end of the forward is one step that runs again.
    graph = chain(9)
    top = simulate(graph, keep_all(graph))
    assert bound_by_moments(graph, top.peak) == top.seconds
    assert bound_by_moments(graph, top.peak - 2) == pytest.approx(top.seconds + 2)
    assert bound_by_moments(graph, 2) == math.inf


def test_what_only_pinned_ops_write_must_be_kept():
    ops = (
        Op("noise", ("x",), ("n",), 1.0, kind="pinned"),
        Op("big", ("n",), ("b",), 1.0),
        Op("out", ("b",), ("y",), 1.0),
        Op("grad", ("n", "t"), ("g",), 1.0, phase="backward"),
    )
    sizes = {"x": 1, "n": 6, "b": 10, "y": 1, "t": 1, "g": 1}
    kinds = {"x": "input", "y": "output", "t": "tangent", "g": "gradient"}
    graph = Graph(ops, tuple(Value(n, size, kinds.get(n, "activation")) for n, size in sizes.items()))
    assert bound_by_moments(graph, 18) == 4.0  # x, n, b and y beside each other
    assert bound_by_moments(graph, 17) == math.inf
    assert best_in_any_order(graph, 18) == 4.0
    assert best_in_any_order(graph, 17) is None


def test_a_saved_random_state_takes_room_when_its_op_runs_again():
    step = Step()
    x, w = step.value("x", 0, "input"), step.value("w", 0, "parameter")
    (a,) = step.op("a", [x, w], [8], 1.0, kind="random", state=3)
    (b,) = step.op("b", [a], [8], 1.0)
    (c,) = step.op("c", [b], [8], 1.0)
    (d,) = step.op("d", [c], [1], 1.0)
    graph = step.graph(d, needs={"a": [], "b": [a], "c": [], "d": []})
    stateless = tuple(Op(op.name, op.reads, op.writes, op.seconds, phase=op.phase) for op in graph.ops)
    plain = graph.replace(ops=stateless)
    peaks = [simulate(g, auto(g, 0)).peak for g in (graph, plain)]
    assert bound_by_moments(graph, peaks[1]) >= bound_by_moments(plain, peaks[1])
    assert bound_by_moments(graph, peaks[0]) <= simulate(graph, auto(graph, peaks[0])).seconds


def in_place_chain(takes: bool) -> Graph:
    """Values of 8 bytes, each written in the place of the one before; no gradient reads any of them."""
    ops = [Op("f0", ("x",), ("v0",), 1.0)]
    for i in range(1, 4):
        ops.append(Op(f"f{i}", (f"v{i - 1}",), (f"v{i}",), 1.0, takes=(f"v{i - 1}",) if takes else ()))
    values = [Value("x", 1, "input"), *(Value(f"v{i}", 8) for i in range(3)), Value("v3", 8, "output")]
    return Graph(tuple(ops), tuple(values))


def test_a_write_in_place_needs_one_of_the_two():
    assert bound_by_moments(in_place_chain(False), 17) == 4.0
    assert bound_by_moments(in_place_chain(False), 16) == math.inf
    assert bound_by_moments(in_place_chain(True), 9) == 4.0
    assert bound_by_moments(in_place_chain(True), 8) == math.inf
    assert simulate(in_place_chain(True), keep_all(in_place_chain(True))).peak == 9


def test_the_fullest_first_runs_are_moments_however_few_there_are(monkeypatch):
    graph = cnn(3)
    budget = simulate(graph, keep_all(graph)).peak // 2
    all_moments = bound_by_moments(graph, budget)
    monkeypatch.setattr(moments, "MOMENTS", 2)
    assert len(moments.crowded(moments.RequiredOps(graph))) == moments.FULLEST
    few = bound_by_moments(graph, budget)
    monkeypatch.setattr(moments, "FULLEST", 0)
    assert bound_by_moments(graph, budget) < few <= all_moments


def test_graphs_with_nothing_to_do():
    empty = Graph((), ())
    assert bound_by_moments(empty, 0) == 0.0
    given = Graph((), (Value("w", 5, "parameter"),), boundary=2)
    assert bound_by_moments(given, 7) == 0.0
    assert bound_by_moments(given, 6) == math.inf
    free = chain(5, seconds=0.0)
    assert bound_by_moments(free, simulate(free, keep_all(free)).peak) == 0.0


def brute_force_cut(nodes: int, arcs: list[tuple[int, int, int]]) -> int:
    others = range(2, nodes)
    sides = ({SOURCE, *near} for size in range(nodes - 1) for near in combinations(others, size))
    return min(sum(c for tail, head, c in arcs if tail in near and head not in near) for near in sides)


@settings(max_examples=100)
@given(st.integers(2, 8), seeds)
def test_the_cut_is_the_smallest(nodes, seed):
    rng = Random(seed)
    pairs = [(a, b) for a in range(nodes) for b in range(nodes) if a != b and b != SOURCE and a != SINK]
    arcs = [(a, b, rng.choice([0, 1, 2, 7, 1 << 70])) for a, b in pairs if rng.random() < 0.6]
    network = Network(nodes, [a for a, _, _ in arcs], [b for _, b, _ in arcs])
    found = network.cut([c for _, _, c in arcs])
    assert found.flow == brute_force_cut(nodes, arcs)
    assert found.near[SOURCE]
    assert not found.near[SINK]
    assert found.flow == sum(c for a, b, c in arcs if found.near[a] and not found.near[b])
