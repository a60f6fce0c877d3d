"""Ops with several outputs: one more run gives back all of them, and that is what descents expect of it."""

from random import Random

import pytest

from graphs import random_graph
from lowtide.plans.graph import Graph, Op, Value
from lowtide.plans.keep_all import keep_all
from lowtide.plans.order import first_order
from lowtide.plans.simulator import simulate
from lowtide.solve import auto
from lowtide.solve.search.any_order import AnyOrder
from lowtide.solve.search.greedy import PlainTape
from lowtide.solve.search.native import NativeTape, library
from lowtide.solve.search.tape import Facts

TWINS = [PlainTape, NativeTape] if library() is not None else [PlainTape]


def cheap_quarters_beside_dearer_wholes() -> Graph:
    """Four outputs of an op wait over a wide run beside those of three ops; all are read in the end.

    Each of the three is dearer than the op by all its bytes, and cheaper than it by those of one output.
    """
    quarters, wholes = [f"a{i}" for i in range(4)], [f"b{i}" for i in range(3)]
    ops = (
        Op("split", ("x",), tuple(quarters), 1.0),
        *(Op(f"make {name}", ("x",), (name,), 0.5) for name in wholes),
        Op("widen", ("x",), ("w",), 1.0),
        Op("narrow", ("w",), ("s",), 1.0),
        Op("join", (*quarters, *wholes, "s"), ("y",), 1.0),
    )
    sizes = {"x": 1, "w": 20, "s": 1, "y": 1, **dict.fromkeys(quarters, 3), **dict.fromkeys(wholes, 4)}
    kinds = {"x": "input", "y": "output"}
    return Graph(ops, tuple(Value(name, size, kinds.get(name, "activation")) for name, size in sizes.items()))


@pytest.mark.parametrize("twin", TWINS)
def test_a_descent_sees_what_all_outputs_of_an_op_take(twin):
    graph = cheap_quarters_beside_dearer_wholes()
    facts = Facts(graph)
    tape = twin(facts, facts.order(*first_order(graph)))
    budget = tape.peak() - 12
    assert tape.descend(budget)
    assert tape.seconds == pytest.approx(graph.seconds + 1.0)  # and not 1.5, the three others


@pytest.mark.parametrize("twin", TWINS)
def test_an_output_that_nothing_waits_for_does_not_count(twin):
    """Three quarters are read before the wide run alone: by what is left the others are cheaper."""
    graph = cheap_quarters_beside_dearer_wholes()
    early = Op("sum", ("a0", "a1", "a2"), ("t",), 1.0)
    *first, join = graph.ops
    join = Op("join", ("a3", "b0", "b1", "b2", "s", "t"), ("y",), 1.0)
    graph = graph.replace(ops=(*first[:4], early, *first[4:], join), values=(*graph.values, Value("t", 1)))
    facts = Facts(graph)
    tape = twin(facts, facts.order(*first_order(graph)))
    assert tape.descend(tape.peak() - 4)
    assert tape.seconds == pytest.approx(graph.seconds + 0.5)


@pytest.mark.slow
@pytest.mark.skipif(library() is None, reason="there is no C compiler here")
def test_auto_is_as_fast_as_any_order_on_graphs_full_of_such_ops():
    tried = 0
    for seed in range(12):
        graph = random_graph(seed, 6 + seed % 4)
        orders = AnyOrder(Facts(graph))
        if not AnyOrder.handles(orders.facts):
            continue
        top, least = (simulate(graph, schedule).peak for schedule in (keep_all(graph), auto(graph, 0)))
        budget = int(least + (top - least) * Random(seed).choice((0.1, 0.25, 0.5)))
        found = simulate(graph, auto(graph, budget))
        best = orders.fastest(budget, limit=found.again - 1e-9 * found.seconds, work=2_000_000)
        assert best.order is None, seed
        tried += best.complete
    assert tried > 5
