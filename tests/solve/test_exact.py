"""The exact solver against exhaustive search, and its claims against the simulator."""

from __future__ import annotations

import math
import sys
from dataclasses import replace

import pytest

from graphs import Step, chain, cnn, random_graph, transformer, with_takes
from lowtide.errors import LowtideError
from lowtide.plans.graph import Graph, Op, Value
from lowtide.plans.keep_all import keep_all
from lowtide.plans.simulator import simulate
from lowtide.solve import auto
from lowtide.solve.bound import lower_bound
from lowtide.solve.exact import exact, method, smallest_peak, solve_exact
from lowtide.solve.exact.model import Stages
from oracle import best_seconds


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """The limit is of the clock's seconds: on a busy machine a whole search may take many of them."""
    options = method._options
    monkeypatch.setattr(method, "_options", lambda limit: options(3600.0 if limit else limit))


@pytest.fixture
def highs():
    """The solver itself, and what it is called through: no shortcut by a bound or a start."""
    pytest.importorskip("highspy")
    from lowtide.solve.exact.method import _branch_and_bound

    def solve(graph: Graph, budget: int):
        return _branch_and_bound(Stages(graph), budget, keep_all(graph), seconds_limit=3600.0)

    return solve


def stateless(graph: Graph) -> Graph:
    """The graph without saved random states, which the oracle does not model."""
    return graph.replace(ops=tuple(replace(op, state=0) for op in graph.ops))


def tiny_graphs() -> list[Graph]:
    """Graphs of all kinds that exhaustive search is quick on."""
    plain = [random_graph(seed, 4, special=False) for seed in range(30)]
    special = [stateless(random_graph(seed, 3)) for seed in range(30)]
    return [chain(4), chain(5), *(g for g in plain + special if sum(len(op.writes) for op in g.ops) < 16)]


@pytest.mark.slow
def test_equals_exhaustive_search(highs):
    tried = rerun = infeasible = 0
    for graph in tiny_graphs():
        top = simulate(graph, keep_all(graph))
        for share in (98, 90, 80):
            budget = top.peak * share // 100
            found, best = highs(graph, budget), best_seconds(graph, budget)
            tried += 1
            assert found.optimal
            if best is None:
                infeasible += 1
                assert (found.schedule, found.seconds, found.bound) == (None, math.inf, math.inf)
            else:
                rerun += best > top.seconds
                assert found.seconds == pytest.approx(best, abs=1e-9)
                assert simulate(graph, found.schedule).peak <= budget
    assert tried > 120
    assert rerun > 30
    assert infeasible > 60


@pytest.mark.slow
@pytest.mark.parametrize("graph", [chain(8), chain(10), cnn(1), transformer(1), random_graph(2, 12)])
@pytest.mark.parametrize("share", [90, 70])
def test_larger_graphs_are_no_slower_than_auto_and_no_faster_than_the_bound(graph, share):
    pytest.importorskip("highspy")
    budget = simulate(graph, keep_all(graph)).peak * share // 100
    found, start = solve_exact(graph, budget), simulate(graph, auto(graph, budget))
    assert found.optimal
    assert found.seconds >= lower_bound(graph, budget) * (1 - 1e-9) or found.schedule is None
    if start.peak <= budget:
        assert found.seconds <= start.seconds
    if found.schedule is not None:
        timeline = simulate(graph, found.schedule)
        assert timeline.peak <= budget
        assert timeline.seconds == found.seconds == pytest.approx(found.bound)


def test_a_chain_in_few_slots_runs_steps_again_several_times(highs):
    # At 5 bytes a chain of 6 runs 10 steps again: some of them twice.
    found = highs(chain(6), 5)
    assert (found.seconds, found.optimal) == (22.0, True)
    assert highs(chain(6), 4).schedule is None


def dropout_step(state: int) -> Graph:
    """A random op whose output is worth dropping, were it not for its state."""
    step = Step()
    x, w = step.value("x", 0, "input"), step.value("w", 0, "parameter")
    (a,) = step.op("a", [x, w], [8], 1.0, kind="random", state=state)
    (b,) = step.op("b", [a], [8], 1.0)
    (c,) = step.op("c", [b], [8], 1.0)
    (d,) = step.op("d", [c], [1], 1.0)
    return step.graph(d, needs={"a": [], "b": [a], "c": [c], "d": [c]})


@pytest.mark.slow
def test_a_saved_random_state_takes_room_from_the_first_run_to_the_last(highs):
    free = dropout_step(0)
    least = next(b for b in range(100) if highs(free, b).schedule is not None)
    assert simulate(free, highs(free, least).schedule).again > 0
    for state in range(1, 9):
        graph = dropout_step(state)
        for budget in range(least, simulate(graph, keep_all(graph)).peak):
            found = highs(graph, budget)
            assert found.optimal
            if found.schedule is not None:
                assert simulate(graph, found.schedule).peak <= budget
            else:
                assert simulate(graph, auto(graph, budget)).peak > budget
    # A state of more than the value itself leaves nothing to gain.
    assert highs(dropout_step(9), simulate(free, keep_all(free)).peak - 1).schedule is None


@pytest.mark.slow
def test_smallest_peak_is_the_least_budget_that_fits(highs):
    for graph in (chain(6), stateless(random_graph(3, 4)), transformer(1)):
        least = simulate(graph, smallest_peak(graph)).peak
        assert highs(graph, least).schedule is not None
        assert highs(graph, least - 1).schedule is None
        assert simulate(graph, exact(graph, 0)).peak == least


@pytest.mark.slow
def test_the_smallest_peak_is_no_slower_than_that_peak_asked_for(monkeypatch):
    pytest.importorskip("highspy")
    monkeypatch.setattr(method, "FREE", 0)
    monkeypatch.setattr(
        method, "auto", lambda graph, budget: keep_all(graph)
    )  # which leaves the most to find
    graph = random_graph(13, 8)
    least = simulate(graph, exact(graph, 0))
    assert least.peak < simulate(graph, keep_all(graph)).peak
    assert least.seconds == solve_exact(graph, least.peak).seconds


def scaled(graph: Graph, factor: int) -> Graph:
    """The graph with all its bytes multiplied."""
    return graph.replace(
        values=tuple(replace(value, bytes=value.bytes * factor) for value in graph.values),
        ops=tuple(replace(op, workspace=op.workspace * factor, state=op.state * factor) for op in graph.ops),
        fixed={name: size * factor for name, size in graph.fixed.items()},
        boundary=graph.boundary * factor,
    )


def test_the_smallest_peak_of_gigabytes_is_that_of_bytes(monkeypatch):
    pytest.importorskip("highspy")
    monkeypatch.setattr("lowtide.solve.exact.method.auto", keep_all)  # no help from a good start
    for seed in (7, 19, 38):
        graph = random_graph(seed, 3)
        large = scaled(graph, 10**9 + 7)
        least = simulate(graph, smallest_peak(graph)).peak
        assert simulate(large, smallest_peak(large)).peak == least * (10**9 + 7)


@pytest.mark.slow
def test_bytes_beyond_floating_point_are_not_searched(monkeypatch):
    pytest.importorskip("highspy")
    monkeypatch.setattr(method, "FREE", 0)  # the search over all orders counts in whole numbers
    graph = scaled(chain(6), 10**15)
    assert solve_exact(graph, 5 * 10**15).seconds == 22.0  # all are multiples of one number
    odd = graph.replace(values=tuple(replace(v, bytes=v.bytes + i) for i, v in enumerate(graph.values)))
    least = simulate(odd, auto(odd, 0)).peak
    found = solve_exact(odd, least)
    assert (found.seconds, found.optimal) == (simulate(odd, auto(odd, least)).seconds, False)
    assert simulate(odd, exact(odd, 0)).peak == least


def test_a_budget_above_the_natural_peak_keeps_everything():
    pytest.importorskip("highspy")
    graph = transformer(1)
    top = simulate(graph, keep_all(graph))
    found = solve_exact(graph, top.peak)
    assert (found.schedule, found.seconds, found.optimal) == (keep_all(graph), top.seconds, True)
    assert exact(graph, top.peak) == keep_all(graph)


@pytest.mark.slow
def test_with_writes_in_place_it_equals_exhaustive_search(highs):
    plain = [random_graph(seed, 4, special=False, takes=True) for seed in range(20)]
    special = [stateless(random_graph(seed, 3, takes=True)) for seed in range(20)]
    helped = rerun = infeasible = 0
    for graph in [g for g in plain + special if sum(len(op.writes) for op in g.ops) < 16]:
        without = graph.replace(ops=tuple(replace(op, takes=()) for op in graph.ops))
        top = simulate(graph, keep_all(graph))
        for share in (98, 85):
            budget = top.peak * share // 100
            found, best = highs(graph, budget), best_seconds(graph, budget)
            assert found.optimal
            if best is None:
                infeasible += 1
                assert found.schedule is None
                continue
            assert found.seconds == pytest.approx(best, abs=1e-9)
            assert simulate(graph, found.schedule).peak <= budget
            rerun += best > top.seconds
            helped += highs(without, budget).seconds > best
    assert rerun > 5
    assert helped > 3
    assert infeasible > 10


def test_what_only_fits_in_place_is_no_error():
    pytest.importorskip("highspy")
    graph = with_takes(chain(6), 0, share=1.0)
    plain = graph.replace(ops=tuple(replace(op, takes=()) for op in graph.ops))
    least = simulate(graph, auto(graph, 0)).peak
    assert solve_exact(plain, least).schedule is None
    assert simulate(graph, solve_exact(graph, least).schedule).peak <= least


def test_graphs_with_nothing_to_choose():
    pytest.importorskip("highspy")
    given = Graph((), (Value("w", 5, "parameter"),), boundary=2)
    assert solve_exact(given, 7).schedule == keep_all(given)
    assert solve_exact(given, 6).schedule is None
    assert exact(given, 0) == keep_all(given)
    value = Value("x", 2, "input"), Value("y", 4, "gradient"), Value("t", 4, "tangent", held=True)
    early = Graph((Op("f", ("x",), ("y",), 1.0, workspace=2),), value)
    assert simulate(early, keep_all(early)).peak == 12
    assert solve_exact(early, 11).schedule is None
    free = chain(4, seconds=0.0)
    assert solve_exact(free, simulate(free, keep_all(free)).peak - 1).seconds == 0.0


@pytest.mark.slow
def test_when_time_runs_out_the_start_comes_back_with_a_bound():
    pytest.importorskip("highspy")
    graph = cnn(3)
    budget = simulate(graph, keep_all(graph)).peak * 5 // 10
    found, start = solve_exact(graph, budget, seconds_limit=0.0), simulate(graph, auto(graph, budget))
    assert not found.optimal
    assert found.seconds <= start.seconds
    assert lower_bound(graph, budget) <= found.bound <= found.seconds


@pytest.mark.slow
def test_a_graph_that_is_too_large_is_not_searched(monkeypatch):
    pytest.importorskip("highspy")
    graph = cnn(2)
    budget = simulate(graph, keep_all(graph)).peak * 6 // 10
    start, bound = auto(graph, budget), lower_bound(graph, budget)
    monkeypatch.setattr("lowtide.solve.exact.model.MOST_TERMS", 10_000)
    found = solve_exact(graph, budget)
    assert (found.schedule, found.bound, found.optimal) == (start, bound, False)
    assert solve_exact(graph, budget // 4).schedule is None
    assert exact(graph, 0) == auto(graph, 0)


def test_a_claim_that_the_simulator_does_not_see_is_an_error():
    from lowtide.solve.exact.method import _Answer, _checked

    graph = chain(6)
    stages = Stages(graph)
    nothing_again = _Answer([0.0] * len(stages.seconds), 0.0, 0.0, complete=True)
    top = simulate(graph, keep_all(graph))
    assert _checked(stages, nothing_again, top.peak, top.seconds) == keep_all(graph)
    with pytest.raises(LowtideError, match=r"HiGHS claims 12\.0 seconds under 5 bytes, but .* 9 bytes"):
        _checked(stages, nothing_again, 5, top.seconds)
    with pytest.raises(LowtideError, match=r"HiGHS claims 11\.0 seconds"):
        _checked(stages, nothing_again, top.peak, 11.0)


def test_orders_and_columns_are_each_others_inverse():
    graph = chain(6)
    stages = Stages(graph)
    schedule = auto(graph, 6)
    chosen = stages.choices(schedule)
    columns = [chosen.get(column, 0.0) for column in range(len(stages.seconds))]
    runs = [step.op for step in schedule.steps if hasattr(step, "op")]
    forward, backward = stages.order(columns)
    assert [*forward, *backward] == runs


def test_without_highspy_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "highspy", None)
    for solver in (exact, solve_exact, lambda graph, budget: smallest_peak(graph)):
        with pytest.raises(LowtideError, match=r'needs the package highspy.*pip install "lowtide\[exact\]"'):
            solver(chain(3), 1)
