"""Other orders of first runs: valid, with the random ops where they were, and smaller where order matters."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphs import MIB, Step, chain, random_graph
from lowtide.plans.graph import Graph, Op
from lowtide.plans.keep_all import keep_all
from lowtide.plans.order import first_order, with_drops
from lowtide.plans.simulator import simulate
from lowtide.solve import auto
from lowtide.solve.search.reorder import first_orders


@settings(max_examples=60)
@given(st.integers(0, 10_000), st.integers(1, 30))
def test_every_order_is_accepted_and_runs_each_op_once(seed, n):
    graph = random_graph(seed, n)
    forward, backward = first_order(graph)
    orders = first_orders(graph)
    assert orders[0] == (forward, backward)
    fixed = [name for name in [*forward, *backward] if graph.op[name].kind != "pure"]
    for ahead, behind in orders:
        timeline = simulate(graph, with_drops(graph, ahead, behind))
        assert timeline.again == 0
        assert sorted(ahead) == sorted(forward)
        assert sorted(behind) == sorted(backward)
        assert [name for name in [*ahead, *behind] if graph.op[name].kind != "pure"] == fixed


def weights_at_the_end(layers: int) -> Graph:
    """A chain whose weight gradients all come last in program order, as some tracers write them."""
    graph = chain_with_weights([8 * MIB] * (layers + 1), [MIB] * layers)
    late = [op for op in graph.ops if op.name.endswith(".dw")]
    rest = [op for op in graph.ops if not op.name.endswith(".dw")]
    return graph.replace(ops=(*rest, *late))


def chain_with_weights(activations: list[int], weights: list[int]) -> Graph:
    """A chain in which the gradients of input and weight are formed by two ops."""
    step = Step()
    last = step.value("x", activations[0], "input")
    for i, weight in enumerate(weights):
        w = step.value(f"w{i}", weight, "parameter")
        (last,) = step.op(f"f{i}", [last, w], [activations[i + 1]], 1.0)
    graph = step.graph(last)
    ops: list[Op] = []
    for op in graph.ops:
        if op.phase != "backward" or len(op.writes) == 1:
            ops.append(op)
            continue
        for write in op.writes:
            to_weight = graph.value[write].kind == "gradient"
            name = f"{op.name}.dw" if to_weight else f"{op.name}.dx"
            ops.append(Op(name, op.reads, (write,), op.seconds / 2, op.workspace, "backward"))
    ops.sort(key=lambda op: op.phase == "backward")
    return graph.replace(ops=tuple(ops))


def peak(graph, order):
    return simulate(graph, with_drops(graph, *order)).peak


def test_weight_gradients_are_formed_when_they_free_the_most():
    graph = weights_at_the_end(8)
    program, *others = first_orders(graph)
    best = min(peak(graph, order) for order in others)
    # In program order eight inputs and eight gradients wait side by side.
    assert best <= peak(graph, program) - 6 * 8 * MIB


def test_large_weight_gradients_wait_until_the_activations_are_gone():
    # As in VGG: the first layers have the activations, the last ones the weights.
    graph = chain_with_weights([64 * MIB, 64 * MIB, 64 * MIB, MIB, MIB], [MIB, MIB, MIB, 100 * MIB])
    program, *others = first_orders(graph)
    assert min(peak(graph, order) for order in others) <= peak(graph, program) - 90 * MIB


@pytest.mark.slow
def test_auto_uses_the_order_before_it_runs_anything_again():
    graph = weights_at_the_end(8)
    top = simulate(graph, keep_all(graph)).peak
    timeline = simulate(graph, auto(graph, top - 6 * 8 * MIB))
    assert timeline.again == 0


def test_a_chain_has_one_order():
    assert len(first_orders(chain(6))) == 1
