"""Ops that update what others read: no schedule of any method reads it afterwards."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphs import cnn, random_graph, transformer, with_updates
from lowtide.errors import ScheduleError
from lowtide.plans.graph import Graph
from lowtide.plans.keep_all import keep_all
from lowtide.plans.order import first_order, updates_after_reads
from lowtide.plans.schedule import Run, Schedule
from lowtide.plans.simulator import simulate
from lowtide.solve import METHODS, auto
from lowtide.solve.bound import lower_bound
from lowtide.solve.search.greedy import PlainTape
from lowtide.solve.search.native import NativeTape, library
from lowtide.solve.search.reorder import first_orders
from lowtide.solve.search.tape import Facts
from oracle import best_seconds
from short_search import short_search

seeds = st.integers(0, 10_000)
needs_compiler = pytest.mark.skipif(library() is None, reason="there is no C compiler here")


def updating(seed: int, n: int, takes: bool = False) -> Graph:
    return with_updates(random_graph(seed, n, takes=takes), seed, share=0.8)


def tiny(seed: int) -> Graph:
    graph = with_updates(random_graph(seed, 2 + seed % 2, special=False), seed)
    return graph.replace(ops=tuple(replace(op, state=0) for op in graph.ops))


@settings(max_examples=30)
@given(seed=seeds, n=st.integers(1, 20))
def test_first_orders_update_what_nothing_reads_any_more(seed, n):
    graph = updating(seed, n)
    for order in first_orders(graph):
        runs = [*order[0], *order[1]]
        for reader, updates in graph.updaters.items():
            assert all(runs.index(reader) < runs.index(update) for update in updates if reader in runs)


@settings(max_examples=60)
@given(seeds, st.integers(1, 20), st.lists(st.tuples(st.integers(0), st.integers(0)), max_size=9))
def test_whatever_is_recomputed_updates_wait_for_it(seed, n, picks):
    graph = updating(seed, n)
    forward, backward = first_order(graph)
    again = [name for name in forward if graph.op[name].kind == "pure"]
    for which, where in picks if again else ():
        backward.insert(where % (len(backward) + 1), again[which % len(again)])
    forward, moved = updates_after_reads(graph, forward, backward)
    assert Counter(moved) == Counter(backward)
    last = {name: index for index, name in enumerate(moved)}
    for reader, updates in graph.updaters.items():
        assert all(last.get(reader, -1) < last[update] for update in updates)
    kept = [name for name in backward if not graph.op[name].updates]
    assert [name for name in moved if not graph.op[name].updates] == kept


def test_the_simulator_refuses_a_reader_after_the_update():
    graph = with_updates(transformer(1))
    forward, backward = (list(part) for part in first_order(graph))
    steps = [Run(name) for name in (*backward, forward[1])]
    reader = next(name for name in forward if graph.updaters.get(name))
    with pytest.raises(ScheduleError, match=f"runs '{reader}', which reads what 'update.* has updated"):
        simulate(graph, Schedule(tuple(map(Run, forward)), (*steps, Run(reader))))


@pytest.mark.parametrize(
    "method",
    [
        *sorted(set(METHODS) - {"auto", "exact", "lower_sets"}),
        pytest.param("lower_sets", marks=pytest.mark.slow),  # as `lower_sets_approximate`, with more of them
    ],
)
@settings(max_examples=10)
@given(seed=seeds, n=st.integers(1, 20), share=st.floats(0.3, 1.1), takes=st.booleans())
def test_every_method_keeps_to_it(method, seed, n, share, takes):
    graph = updating(seed, n, takes)
    top = simulate(graph, keep_all(graph)).peak
    assert simulate(graph, METHODS[method](graph, int(top * share))).peak <= top


@pytest.mark.slow
@pytest.mark.parametrize("method", ["auto", "exact"])
@settings(max_examples=15)
@given(seed=seeds, n=st.integers(1, 12), share=st.floats(0.3, 1.1), takes=st.booleans())
def test_methods_that_search_keep_to_it(method, seed, n, share, takes):
    graph = updating(seed, min(n, 5) if method == "exact" else n, takes)  # it has tests of its own
    top = simulate(graph, keep_all(graph)).peak
    budget = int(top * share)
    timeline = simulate(graph, METHODS[method](graph, budget))
    assert timeline.peak <= top
    bound = lower_bound(graph, timeline.peak)
    assert bound is not None
    assert bound <= timeline.seconds + 1e-9


@needs_compiler
@settings(max_examples=40, derandomize=True)
@given(seeds, st.integers(1, 24), st.floats(0.3, 0.95), st.booleans())
def test_both_searches_take_the_same_moves_and_say_what_the_simulator_says(seed, n, share, takes):
    graph = updating(seed, n, takes)
    facts = Facts(graph)
    base = facts.order(*first_order(graph))
    plain, native = PlainTape(facts, base), NativeTape(facts, base)
    budget = int(plain.peak() * share)
    for tape in (plain, native):
        tape.descend(budget)
        tape.prune(max(budget, tape.peak()))
    assert plain.order() == native.order()
    assert simulate(graph, facts.schedule(native.order())).peak == native.peak()
    native.anneal(budget, steps=2000, price=1.0, heat=(1.0, 0.01), seed=seed)
    assert simulate(graph, facts.schedule(native.order())).peak == native.peak()


@pytest.mark.slow
def test_tiny_graphs_get_the_optimum():
    found = best = 0.0
    for seed in range(24):
        graph = tiny(seed)
        top = simulate(graph, keep_all(graph))
        least = simulate(graph, auto(graph, 0)).peak
        for budget in {least, (least + top.peak) // 2}:
            optimum = best_seconds(graph, budget)
            assert optimum is not None
            found += simulate(graph, auto(graph, budget)).seconds - top.seconds
            best += optimum - top.seconds
    assert best > 0
    assert found <= 1.02 * best


def test_gradients_that_go_are_not_there_at_once():
    graph = cnn(6, size=1 << 16, weight=1 << 22)
    with short_search():
        peaks = [simulate(each, auto(each, 0)).peak for each in (graph, with_updates(graph))]
    gradients = sum(value.bytes for value in graph.values if value.kind == "gradient")
    assert peaks[0] - peaks[1] > 0.7 * gradients
