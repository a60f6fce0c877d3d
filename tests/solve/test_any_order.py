"""The search over all orders against exhaustive search, and what keeps an order legal."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from any_order_oracle import best_in_any_order, tiny_graph
from graphs import Step, chain, random_graph, transformer, with_takes, with_updates
from lowtide.plans.graph import Graph, Op, Value
from lowtide.plans.keep_all import keep_all
from lowtide.plans.order import first_order
from lowtide.plans.returning import letting_go
from lowtide.plans.simulator import simulate
from lowtide.solve import auto
from lowtide.solve.bound import lower_bound
from lowtide.solve.exact import solve_exact
from lowtide.solve.search.any_order import MOST, AnyOrder
from lowtide.solve.search.arrange import arrange
from lowtide.solve.search.native import NativeTape, library
from lowtide.solve.search.search import Search
from lowtide.solve.search.tape import Facts

pytestmark = pytest.mark.skipif(library() is None, reason="there is no C compiler here")
WORK = 10_000_000


def fastest(graph: Graph, budget: int, **options):
    """What the search finds; its order is what it says."""
    facts = Facts(graph)
    found = AnyOrder(facts).fastest(budget, **{"work": WORK, **options})
    if found.order is not None:
        timeline = simulate(graph, facts.schedule(found.order))
        assert timeline.peak <= budget
        assert timeline.again == pytest.approx(found.seconds)
    return found


@pytest.mark.parametrize("takes", [pytest.param(False, marks=pytest.mark.slow), True])
def test_it_equals_exhaustive_search(takes):
    rerun = infeasible = 0
    for seed in range(30):
        graph = with_takes(tiny_graph(seed), seed) if takes else tiny_graph(seed)
        top = simulate(graph, keep_all(graph))
        for share in (95, 85, 75):
            budget = top.peak * share // 100
            found, best = fastest(graph, budget), best_in_any_order(graph, budget)
            assert found.complete
            assert (found.order is None) == (best is None)
            infeasible += best is None
            if best is not None:
                assert found.seconds == pytest.approx(best - top.seconds)
                rerun += best > top.seconds
    assert rerun > 10
    assert infeasible > 10


def test_another_order_of_first_runs_may_be_what_fits():
    # Two branches that meet: in program order both large values wait for the small ones.
    ops = (
        Op("wide0", ("x",), ("a",), 1.0),
        Op("wide1", ("x",), ("b",), 1.0),
        Op("thin0", ("a",), ("c",), 1.0),
        Op("thin1", ("b",), ("d",), 1.0),
        Op("join", ("c", "d"), ("y",), 1.0),
    )
    sizes = {"x": 1, "a": 9, "b": 9, "c": 1, "d": 1, "y": 1}
    kinds = {"x": "input", "y": "output"}
    graph = Graph(ops, tuple(Value(n, size, kinds.get(n, "activation")) for n, size in sizes.items()))
    assert simulate(graph, keep_all(graph)).peak == 20
    found = fastest(graph, 12)
    assert (found.seconds, found.complete) == (0.0, True)
    assert solve_exact(graph, 12).any_order if pytest.importorskip("highspy") else True
    assert simulate(graph, auto(graph, 12)).again == 0


def test_every_output_is_there_when_the_step_returns():
    """One that the returning op does not read, too, though it would take less room later."""
    ops = (
        Op("wide", ("x",), ("y",), 1.0),
        Op("other", ("x",), ("z",), 1.0),
        Op("return", ("y",), (), kind="pinned", target="return"),
        Op("grad", ("y", "t"), ("g",), 1.0, phase="backward"),
    )
    sizes = {"x": 1, "y": 9, "z": 5, "t": 1, "g": 1}
    kinds = {"x": "input", "z": "output", "t": "tangent", "g": "gradient"}
    graph = Graph(ops, tuple(Value(n, size, kinds.get(n, "activation")) for n, size in sizes.items()))
    top = simulate(graph, keep_all(graph)).peak
    for budget in range(top + 1):
        order = fastest(graph, budget).order
        assert order is None or order.index(1) < order.index(len(ops))
        simulate(graph, auto(graph, budget))


def test_with_a_limit_it_finds_only_what_is_faster():
    graph = chain(6)
    best = fastest(graph, 5)
    assert best.seconds == 10.0
    assert fastest(graph, 5, limit=10.0).order is None
    assert fastest(graph, 5, limit=10.5).seconds == 10.0


@pytest.mark.slow
def test_when_the_work_runs_out_it_says_what_is_proven():
    graph = random_graph(5, 12)
    budget = simulate(graph, auto(graph, 0)).peak
    found = fastest(graph, budget, work=1000)
    assert not found.complete
    assert found.order is None
    assert 0 <= found.seconds <= simulate(graph, auto(graph, budget)).again


def test_a_saved_random_state_is_one_more_value():
    step = Step()
    x, w = step.value("x", 0, "input"), step.value("w", 0, "parameter")
    (a,) = step.op("a", [x, w], [8], 1.0, kind="random", state=3)
    (b,) = step.op("b", [a], [8], 1.0)
    (c,) = step.op("c", [b], [8], 1.0)
    (d,) = step.op("d", [c], [1], 1.0)
    graph = step.graph(d, needs={"a": [], "b": [a], "c": [c], "d": [c]})
    top = simulate(graph, keep_all(graph)).peak
    least = next(budget for budget in range(top) if fastest(graph, budget).order is not None)
    stateless = graph.replace(ops=tuple(replace(op, state=0) for op in graph.ops))
    assert fastest(graph, least).seconds > 0
    assert fastest(stateless, least).seconds <= fastest(graph, least).seconds
    assert lower_bound(graph, least) <= fastest(graph, least).seconds + graph.seconds
    assert fastest(stateless, least - 1).order is not None


@settings(max_examples=25)
@given(st.integers(0, 10_000), st.integers(1, 6), st.floats(0.6, 1.0), st.booleans())
def test_every_order_is_one_that_the_simulator_accepts(seed, n, share, returns):
    graph = with_updates(random_graph(seed, n, takes=seed % 2 == 0), seed)
    graph = letting_go(graph, {"loss"}) if returns else graph
    if AnyOrder.handles(Facts(graph)):
        found = fastest(graph, int(simulate(graph, keep_all(graph)).peak * share), work=100_000)
        assert found.order is None or found.seconds < math.inf


@settings(max_examples=40)
@given(st.integers(0, 10_000), st.integers(2, 30), st.booleans(), st.booleans())
def test_moved_runs_keep_the_order_legal_and_the_bytes_right(seed, n, takes, returns):
    graph = with_updates(random_graph(seed, n, takes=takes), seed)
    graph = letting_go(graph, {"loss"}) if returns else graph
    facts = Facts(graph)
    forward, backward = first_order(graph)
    tape = NativeTape(facts, facts.order(forward, backward))
    top, once = tape.peak(), tape.seconds
    for turn, share in enumerate((0.9, 0.7, 0.5)):
        budget = int(top * share)
        tape.descend(budget, limit=500)
        options = {"steps": 300, "price": once / budget, "heat": (0.1 * once, 0.01 * once)}
        tape.anneal(budget, **options, shifts=0.7, seed=turn)
        timeline = simulate(graph, facts.schedule(tape.order()))
        assert (tape.peak(), tape.seconds) == (timeline.peak, pytest.approx(timeline.seconds))
        first = list(dict.fromkeys(tape.order()))
        fixed = [graph.ops[op].name for op in first if op < facts.boundary and graph.ops[op].kind != "pure"]
        program = [name for name in (*forward, *backward) if graph.op[name].kind != "pure"]
        updates = {op.name for op in graph.ops if op.updates}  # these wait for the last reader
        assert [n for n in fixed if n not in updates] == [n for n in program if n not in updates]


def test_an_arranged_order_runs_everything_once_and_has_less_above_the_budget():
    search = Search(transformer(2))
    base = search.bases[0]
    orders, edits = arrange(search, base)
    assert edits > 0
    for order in orders:
        assert sorted(order) == sorted(base)
        assert simulate(search.graph, search.facts.schedule(order)).again == 0


def test_large_graphs_are_left_to_other_searches():
    assert AnyOrder.handles(Facts(chain(20)))
    assert not AnyOrder.handles(Facts(chain(MOST)))


def test_the_ways_to_make_space_for_one_run_are_work_too():
    """Of 22 equal values 9 have to go before one run: half a million ways, from a single state."""
    kept = [f"v{i}" for i in range(22)]
    ops = (
        *(Op(f"make {name}", ("x",), (name,), 1.0) for name in kept),
        Op("sum", tuple(kept), ("s",), 1.0),
        Op("widen", ("s",), ("w",), 1.0),
        Op("narrow", ("w",), ("z",), 1.0),
        Op("join", (*kept, "z"), ("y",), 1.0),
    )
    sizes = {"x": 1, "s": 1, "w": 20, "z": 1, "y": 1}
    kinds = {"x": "input", "y": "output"}
    values = [Value(name, sizes.get(name, 1), kinds.get(name, "activation")) for name in (*sizes, *kept)]
    graph = Graph(ops, tuple(values))
    found = fastest(graph, 1 + 22 + 1 + 20 - 9, work=10_000)
    assert found.work <= 10_000 + 65_536
    assert not found.complete
    assert found.seconds <= 9
