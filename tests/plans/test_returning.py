"""Outputs that the caller lets go of: there when the step returns, and an activation afterwards."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphs import random_graph
from lowtide import Drop, FormatError, Graph, Op, Run, Schedule, ScheduleError, Value, simulate
from lowtide.plans.keep_all import keep_all
from lowtide.plans.order import first_order
from lowtide.plans.returning import let_go_of, letting_go, peak_while_held, same_runs
from lowtide.solve import METHODS
from lowtide.solve.search.reorder import first_orders

QUICK = ("chain", "lower_sets_approximate", "rotor", "sequence", "sqrt_segments")


def step_with_logits():
    """A head whose logits are returned beside the loss and not read by the backward."""
    values = (
        Value("x", 8, "input"),
        Value("w", 4, "parameter"),
        Value("logits", 100, "output"),
        Value("softmax", 50),
        Value("loss", 1, "output"),
        Value("tangent", 1, "tangent"),
        Value("d_logits", 60),
        Value("d_w", 4, "gradient"),
    )
    ops = (
        Op("mm", ("x", "w"), ("logits",), 2.0),
        Op("log_softmax", ("logits",), ("softmax",), 1.0),
        Op("nll", ("softmax",), ("loss",), 1.0),
        Op("d_softmax", ("tangent", "softmax"), ("d_logits",), 1.0, phase="backward"),
        Op("d_mm", ("d_logits", "x"), ("d_w",), 2.0, phase="backward"),
    )
    return Graph(ops, values)


def with_outputs(seed, size):
    """A random graph, some of whose activations are returned; and their names."""
    graph, choice = random_graph(seed, size), Random(seed)
    early = set(first_order(graph)[0])
    made = [name for op in graph.ops if op.name in early for name in op.writes]
    names = {name for name in made if graph.value[name].droppable and choice.random() < 0.4}
    values = (replace(value, kind="output") if value.name in names else value for value in graph.values)
    return graph.replace(values=tuple(values)), names


def test_what_is_let_go_of_is_gone_in_the_backward():
    held = step_with_logits()
    free = letting_go(held, {"logits"})
    before, after = simulate(held, keep_all(held)), simulate(free, keep_all(free))
    assert before.peak == 8 + 4 + 100 + 1 + 1 + 50 + 60  # at d_softmax
    assert after.peak == 8 + 4 + 100 + 50 + 1  # at nll, where the logits are still there
    assert (before.seconds, before.again) == (after.seconds, after.again)


def test_it_is_there_when_the_step_returns():
    free = letting_go(step_with_logits(), {"logits"})
    early = (Run("mm"), Run("log_softmax"), Drop("logits"), Run("nll"), Run("return"))
    with pytest.raises(ScheduleError, match=r"'return', which reads 'logits', but that is not there"):
        simulate(free, Schedule(early, ()))
    late = (Run("mm"), Run("log_softmax"), Run("nll"))
    with pytest.raises(ScheduleError, match="output 'returned' is not there"):
        simulate(free, Schedule(late, (Run("return"),)))


def test_nothing_of_the_forward_runs_after_the_return():
    graph = letting_go(step_with_logits(), {"logits"})
    more = graph.replace(
        ops=(*graph.ops, Op("more", ("x",), ("m",))), values=(*graph.values, Value("m", 1, "output"))
    )
    steps = (Run("mm"), Run("log_softmax"), Run("nll"), Run("return"), Drop("logits"), Run("more"))
    with pytest.raises(ScheduleError, match=r"step 5 .* runs 'more' after 'return', where the forward ends"):
        simulate(more, Schedule(steps, ()))


def test_nothing_is_written_in_the_place_of_what_was_returned():
    free = letting_go(step_with_logits(), {"logits"})
    reads = {"reads": ("tangent", "softmax", "logits"), "takes": ("logits",)}
    ops = tuple(replace(op, **reads) if op.name == "d_softmax" else op for op in free.ops)
    values = tuple(replace(v, bytes=100) if v.name == "d_logits" else v for v in free.values)
    with pytest.raises(FormatError, match="takes: 'logits' is returned to the caller"):
        free.replace(ops=ops, values=values)


def test_a_graph_that_lets_go_has_a_json_form():
    free = letting_go(step_with_logits(), {"logits"})
    assert Graph.from_json(free.to_json()) == free
    assert free.fingerprint != step_with_logits().fingerprint
    assert let_go_of(free) == {"logits"}
    assert let_go_of(step_with_logits()) == frozenset()


@settings(max_examples=30)
@given(seed=st.integers(0, 10_000), size=st.integers(2, 14))
def test_holding_after_all_costs_what_the_graph_that_holds_says(seed, size):
    held, names = with_outputs(seed, size)
    free = letting_go(held, names)
    schedule = keep_all(free)
    assert same_runs(schedule, keep_all(held))
    assert peak_while_held(free, schedule, names) == simulate(held, keep_all(held)).peak
    assert peak_while_held(free, schedule, ()) == simulate(free, schedule).peak


@pytest.mark.parametrize("method", QUICK)
@settings(max_examples=10)
@given(seed=st.integers(0, 10_000), size=st.integers(2, 12), share=st.floats(0.3, 1.0))
def test_methods_plan_with_what_is_let_go_of(method, seed, size, share):
    held, names = with_outputs(seed, size)
    free = letting_go(held, names)
    top = simulate(free, keep_all(free)).peak
    made = METHODS[method](free, int(top * share))
    assert simulate(free, made).peak <= top <= simulate(held, keep_all(held)).peak


@given(seed=st.integers(0, 10_000), size=st.integers(2, 14))
def test_other_orders_return_last(seed, size):
    held, names = with_outputs(seed, size)
    for forward, _ in first_orders(letting_go(held, names)):
        assert forward[-1] == "return"
