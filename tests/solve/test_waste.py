"""The native twins of the order's clean-up and of the tape's peak say what the slower ones say."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphs import random_graph
from lowtide.plans import order as plain
from lowtide.plans.order import first_order, with_drops
from lowtide.plans.simulator import simulate
from lowtide.solve import waste
from lowtide.solve.search.native import NativeTape, judge, library
from lowtide.solve.search.search import Search
from lowtide.solve.search.tape import Facts

needs_compiler = pytest.mark.skipif(library() is None, reason="there is no C compiler here")


def longer(graph, chance):
    """The first order with some forward ops recomputed at random places of the backward."""
    forward, backward = first_order(graph)
    pure = [name for name in forward if graph.op[name].kind == "pure"]
    for _ in range(chance.randrange(2 * len(pure) + 1) if pure else 0):
        backward.insert(chance.randrange(len(backward) + 1), chance.choice(pure))
    return forward, backward


@needs_compiler
@given(st.integers(0, 10_000), st.integers(1, 30))
def test_the_same_runs_stay(seed, n):
    graph = random_graph(seed, n)
    order = longer(graph, Random(seed))
    assert waste.without_waste(graph, *order) == plain.without_waste(graph, *order)


def test_without_a_compiler_the_slower_twin_is_asked(monkeypatch):
    monkeypatch.setattr(waste, "library", lambda: None)
    graph = random_graph(3, 12)
    order = longer(graph, Random(3))
    assert waste.without_waste(graph, *order) == plain.without_waste(graph, *order)


@needs_compiler
@given(st.integers(0, 10_000), st.integers(1, 30), st.booleans())
def test_an_order_is_judged_as_its_tape_and_as_the_simulator_have_it(seed, n, takes):
    graph = random_graph(seed, n, takes=takes)
    facts, chance = Facts(graph), Random(seed)
    base = NativeTape(facts, facts.order(*first_order(graph)))
    base.descend(int(base.peak() * chance.uniform(0.4, 1.0)))
    for runs in (facts.order(*first_order(graph)), base.order()):
        tape = NativeTape(facts, runs)
        assert judge(facts, runs) == (tape.peak(), tape.seconds)
        assert judge(facts, runs)[0] == simulate(graph, facts.schedule(runs)).peak


@needs_compiler
def test_a_recomputation_that_nobody_reads_counts_as_the_simulator_counts_it():
    graph = random_graph(7, 20)
    order = longer(graph, Random(7))
    facts = Facts(graph)
    assert judge(facts, facts.order(*order))[0] == simulate(graph, with_drops(graph, *order)).peak


@needs_compiler
def test_descents_on_threads_give_the_ladder_of_one_after_the_other():
    graph = random_graph(11, 30)
    search = Search(graph)
    for base in search.bases:
        search.join(search.down(base))
    threads = Search(graph)
    threads.down_and_seeds()
    assert [(rung.peak, rung.seconds) for rung in threads.ladder] == [
        (rung.peak, rung.seconds) for rung in search.ladder
    ]
