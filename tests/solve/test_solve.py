"""What every solver owes: schedules that the simulator accepts, under the budget where they say so."""

from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphs import chain, cnn, random_graph, transformer, with_takes
from lowtide.errors import LowtideError
from lowtide.plans.graph import Graph, Op, Value
from lowtide.plans.keep_all import keep_all
from lowtide.plans.order import first_order
from lowtide.plans.schedule import Run
from lowtide.plans.simulator import simulate
from lowtide.solve import METHODS, find_method, sqrt_segments
from lowtide.solve.search.greedy import descend, prune
from lowtide.solve.search.tape import Facts, Tape
from short_search import short_search

seeds = st.integers(0, 10_000)

LONG = ("auto", "exact")  # methods that search
EVERY_METHOD = [pytest.param(name, marks=[pytest.mark.slow] * (name in LONG)) for name in sorted(METHODS)]


@pytest.mark.slow
@pytest.mark.parametrize("method", EVERY_METHOD)
@settings(max_examples=15)
@given(seed=seeds, n=st.integers(1, 20), share=st.floats(0.3, 1.1), takes=st.booleans())
def test_every_schedule_is_accepted_and_pinned_ops_run_once(method, seed, n, share, takes):
    graph = random_graph(seed, min(n, 6) if method == "exact" else n, takes=takes)  # it has tests of its own
    top = simulate(graph, keep_all(graph)).peak
    with short_search():
        schedule = METHODS[method](graph, int(top * share))
    timeline = simulate(graph, schedule)
    assert timeline.peak <= top
    runs = Counter(step.op for step in schedule.steps if isinstance(step, Run))
    assert all(runs[op.name] == 1 for op in graph.ops if op.kind == "pinned")


@pytest.mark.parametrize("method", sorted(METHODS))
@pytest.mark.parametrize("graph", [transformer(2), with_takes(transformer(2), 0)], ids=["plain", "takes"])
def test_a_budget_above_the_natural_peak_costs_nothing(method, graph):
    top = simulate(graph, keep_all(graph)).peak
    assert METHODS[method](graph, top) == keep_all(graph)


@pytest.mark.parametrize("method", sorted(METHODS))
def test_a_graph_without_ops_has_an_empty_schedule(method):
    graph = chain(1).replace(ops=(), values=())
    assert simulate(graph, METHODS[method](graph, 0)).peak == 0


def test_segments_of_a_chain_take_about_twice_the_root_for_one_more_forward():
    graph = chain(100)
    timeline = simulate(graph, sqrt_segments(graph, 0))
    assert timeline.peak <= 2 * 10 + 6
    assert timeline.again <= 100


def test_segments_choose_the_fastest_that_fits():
    graph = cnn(6)
    least = simulate(graph, sqrt_segments(graph, 0))
    top = simulate(graph, keep_all(graph))
    some = simulate(graph, sqrt_segments(graph, (least.peak + top.peak) // 2))
    assert some.peak <= (least.peak + top.peak) // 2
    assert top.seconds < some.seconds <= least.seconds


def test_an_unknown_method_is_named_with_the_known_ones():
    with pytest.raises(LowtideError, match="'magic' is not known; choose one of auto, chain"):
        find_method("magic")


@settings(max_examples=40)
@given(seeds, st.integers(1, 25), st.booleans())
def test_a_tape_agrees_with_the_simulator_through_edits(seed, n, takes):
    graph, rng = random_graph(seed, n, takes=takes), Random(seed)
    facts = Facts(graph)
    tape = Tape(facts, facts.order(*first_order(graph)))
    for _ in range(12):
        edit(tape, rng)
        timeline = simulate(graph, facts.schedule(tape.order()))
        assert tape.peak() == timeline.peak
        assert tape.seconds == pytest.approx(timeline.seconds)
        fresh = Tape(facts, tape.order())
        assert tape.mem[tape.mem > 0].tolist() == fresh.mem[fresh.mem > 0].tolist()


def edit(tape: Tape, rng: Random) -> None:
    """Run something again before a random run, or take a repeated run away."""
    again = [slot for slots in tape.runs for slot in slots[1:]]
    if again and rng.random() < 0.3:
        tape.remove(rng.choice(again))
        return
    slot = rng.choice([slot for slot, op in enumerate(tape.at) if op >= 0])
    ran = [
        op for op, slots in enumerate(tape.runs) if slots and slots[0] < slot and tape.facts.recomputable[op]
    ]
    if ran:
        if not tape.free_slots(slot, 1) or rng.random() < 0.3:
            tape.widen(slot, 3)
            slot += 3
        tape.insert(rng.choice(ran), rng.choice([*tape.free_slots(slot, 1), slot - 1]))


@pytest.mark.slow
@settings(max_examples=25)
@given(seeds, st.integers(3, 25), st.floats(0.4, 0.95), st.booleans())
def test_a_descent_that_says_it_fits_does_and_pruning_keeps_it_so(seed, n, share, takes):
    graph = random_graph(seed, n, takes=takes)
    facts = Facts(graph)
    tape = Tape(facts, facts.order(*first_order(graph)))
    budget = int(tape.peak() * share)
    if descend(tape, budget):
        before = tape.seconds
        prune(tape, budget)
        timeline = simulate(graph, facts.schedule(tape.order()))
        assert timeline.peak <= budget
        assert timeline.seconds <= before + 1e-9


def late_graph() -> Graph:
    """Forward ops that only the backward needs: two random ones, a pure one, and one that is a gradient."""
    ops = [
        Op("f", ("x", "w"), ("y",), 1.0),
        Op("r0", ("x",), ("r0",), 1.0, kind="random"),
        Op("r1", ("x",), ("r1",), 1.0, kind="random"),
        Op("late", ("x",), ("late",), 1.0),
        Op("constant", ("x",), ("dv",), 1.0),
        Op("b0", ("t", "r1"), ("g0",), 1.0, phase="backward"),
        Op("b1", ("g0", "r0", "late"), ("dw",), 1.0, phase="backward"),
    ]
    kinds = {
        "x": "input",
        "w": "parameter",
        "y": "output",
        "t": "tangent",
        "dw": "gradient",
        "dv": "gradient",
    }
    names = ["x", "w", "t", *(name for op in ops for name in op.writes)]
    return Graph(tuple(ops), tuple(Value(name, 1, kinds.get(name, "activation")) for name in names))


def test_forward_ops_that_only_the_backward_needs_run_late_and_random_ones_where_the_program_has_them():
    graph = late_graph()
    assert first_order(graph) == (["f", "r0", "r1"], ["b0", "late", "b1", "constant"])
    for method in METHODS.values():
        simulate(graph, method(graph, 0))
