"""The compiled search does what its Python twins do, and there is a plan without a compiler too."""

from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from graphs import chain, cnn, random_graph, transformer, with_takes
from lowtide.plans.graph import Graph, Op, Value
from lowtide.plans.keep_all import keep_all
from lowtide.plans.order import first_order
from lowtide.plans.simulator import simulate
from lowtide.solve.search.greedy import PlainTape
from lowtide.solve.search.native import NativeTape, library
from lowtide.solve.search.tape import Facts

needs_compiler = pytest.mark.skipif(library() is None, reason="there is no C compiler here")
GRAPHS = {"chain": chain(20), "cnn": cnn(4), "transformer": transformer(3)}
GRAPHS["takes"] = with_takes(GRAPHS["cnn"], 0)


def tapes(graph):
    facts = Facts(graph)
    base = facts.order(*first_order(graph))
    return PlainTape(facts, base), NativeTape(facts, base)


# The same graphs every time: the two space their slots differently, so a slot that a run has left is used
# again at other times, and the descents part on one graph in some thousands.
@pytest.mark.slow
@needs_compiler
@settings(max_examples=100, derandomize=True)
@given(
    st.integers(0, 10_000),
    st.integers(1, 30),
    st.floats(0.3, 0.95),
    st.sampled_from([0.7, 1.0, 1.4]),
    st.booleans(),
)
def test_both_take_the_same_moves(seed, n, share, exponent, takes):
    plain, native = tapes(random_graph(seed, n, takes=takes))
    assert plain.peak() == native.peak()
    budget = int(plain.peak() * share)
    reached = [tape.descend(budget, exponent=exponent) for tape in (plain, native)]
    assert reached[0] == reached[1]
    assert plain.order() == native.order()
    for tape in (plain, native):
        tape.prune(max(budget, tape.peak()))
    assert plain.order() == native.order()
    assert plain.peak() == native.peak()
    assert plain.seconds == pytest.approx(native.seconds)


@needs_compiler
@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("share", [0.75, 0.5, 0.3])
def test_both_take_the_same_moves_on_networks(name, share):
    plain, native = tapes(GRAPHS[name])
    budget = int(plain.peak() * share)
    for tape in (plain, native):
        tape.descend(budget, tolerance=0.25)
        tape.prune(max(budget, tape.peak()))
    assert plain.order() == native.order()


@needs_compiler
@settings(max_examples=40)
@given(st.integers(0, 10_000), st.integers(2, 30), st.booleans())
@example(280, 29, False)  # a held value is read between two runs of its writer
def test_what_a_tape_says_is_what_the_simulator_says(seed, n, takes):
    graph, chance = random_graph(seed, n, takes=takes), Random(seed)
    _, tape = tapes(graph)
    once = tape.seconds
    for turn in range(6):
        budget = int(tape.peak() * chance.uniform(0.6, 1.0))
        tape.descend(budget, noise=chance.choice([0.0, 0.5]), seed=turn)
        tape.ruin(0.2, 0.9, share=0.5, seed=turn)
        tape.anneal(budget, steps=200, price=once / budget, heat=(0.1 * once, 0.001 * once), seed=turn)
        timeline = simulate(graph, tape.facts.schedule(tape.order()))
        assert tape.peak() == timeline.peak
        assert tape.seconds == pytest.approx(timeline.seconds)


@needs_compiler
def test_a_value_is_dropped_where_that_lets_a_run_write_in_its_place():
    ops = (
        Op("make", ("x",), ("a",), 1.0),
        Op("relu", ("a",), ("b",), 1.0, workspace=4, takes=("a",)),
        Op("loss", ("b",), ("y",), 1.0),
        Op("relu_backward", ("t", "a"), ("g",), 1.0, phase="backward"),
    )
    sizes = {"x": 1, "a": 8, "b": 8, "y": 1, "t": 1, "g": 1}
    kinds = {"x": "input", "y": "output", "t": "tangent", "g": "gradient"}
    graph = Graph(ops, tuple(Value(n, size, kinds.get(n, "activation")) for n, size in sizes.items()))
    for tape in tapes(graph):
        # Only the run of relu is above 18 bytes, and there a does not wait: it is read.
        assert tape.peak() == 21
        assert tape.descend(18)
        assert (tape.peak(), tape.seconds) == (13, 5.0)


@needs_compiler
def test_annealing_keeps_to_the_budget_and_never_gets_slower():
    graph = cnn(4)
    _, tape = tapes(graph)
    once, budget = tape.seconds, tape.peak() * 3 // 5
    assert tape.descend(budget)
    before = tape.seconds
    tape.anneal(budget, steps=20_000, price=once / budget, heat=(0.05 * once, 0.001 * once), seed=1)
    assert tape.peak() <= budget
    assert tape.seconds <= before + 1e-9


@needs_compiler
def test_a_copy_is_edited_alone():
    _, tape = tapes(transformer(2))
    order, copy = tape.order(), tape.copy()
    copy.descend(tape.peak() * 2 // 3)
    assert tape.order() == order != copy.order()


@needs_compiler
def test_a_descent_gives_up_after_so_many_edits():
    plain, native = tapes(transformer(3))
    for tape in (plain, native):
        assert not tape.descend(0, limit=100)
    assert plain.order() == native.order()


@needs_compiler
def test_a_tape_gives_up_when_its_time_is_over():
    facts = Facts(transformer(6))
    base = facts.order(*first_order(facts.graph))
    free, late = NativeTape(facts, base), NativeTape(facts, base, until=0.0)
    for tape in (free, late):
        assert not tape.descend(0, limit=100_000)
    assert late.edits < free.edits / 2
    again = late.copy()  # which knows its end
    again.descend(0, limit=100_000)
    assert again.edits < free.edits


def test_budgets_of_the_plain_twin_hold():
    graph = cnn(3)
    plain, _ = tapes(graph) if library() is not None else (PlainTape(*_base(graph)), None)
    top = simulate(graph, keep_all(graph)).peak
    assert plain.descend(top * 3 // 4)
    assert simulate(graph, plain.facts.schedule(plain.order())).peak <= top * 3 // 4


def _base(graph):
    facts = Facts(graph)
    return facts, facts.order(*first_order(graph))
