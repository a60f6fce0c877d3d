"""Stages: every op in one stage, in order; cuts where few bytes cross; orders that the simulator takes."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphs import chain, cnn, random_graph, transformer
from lowtide.plans.graph import Graph
from lowtide.plans.keep_all import keep_all
from lowtide.plans.order import first_order, with_drops
from lowtide.plans.simulator import simulate
from lowtide.solve.chain_stages import Stages, crossing_bytes, find_stages, stages_at

seeds = st.integers(0, 10_000)
sizes = st.integers(1, 25)


def joined(stages: Stages) -> tuple[list[str], list[str]]:
    forward = [name for stage in stages.forward for name in stage]
    return forward, [name for stage in reversed(stages.backward) for name in stage]


@settings(max_examples=60)
@given(seeds, sizes, st.one_of(st.none(), st.integers(1, 12)))
def test_each_run_is_in_one_stage_and_the_program_order_is_kept(seed, n, most):
    graph = random_graph(seed, n)
    stages = find_stages(graph, most)
    assert joined(stages) == first_order(graph)
    assert len(stages.backward) == len(stages) == len(stages.crossing) - 1
    assert all(stages.forward)
    assert most is None or len(stages) <= most


@settings(max_examples=40)
@given(seeds, sizes)
def test_crossing_bytes_are_those_of_values_written_before_and_read_after(seed, n):
    graph = random_graph(seed, n)
    forward, _ = first_order(graph)
    for cut, found in enumerate(crossing_bytes(graph, forward)):
        written = {value for name in forward[:cut] for value in graph.op[name].writes}
        read = {value for name in forward[cut:] for value in graph.op[name].reads}
        assert found == sum(graph.value[v].bytes for v in written & read if graph.value[v].droppable)


@settings(max_examples=40)
@given(seeds, sizes)
def test_no_neighbour_of_a_cut_is_crossed_by_fewer_bytes(seed, n):
    graph = random_graph(seed, n)
    forward, _ = first_order(graph)
    crossing, at = crossing_bytes(graph, forward), 0
    for stage in find_stages(graph).forward[:-1]:
        at += len(stage)
        assert at == 1 or crossing[at] <= crossing[at - 1]
        assert at == len(forward) - 1 or crossing[at] <= crossing[at + 1]


@settings(max_examples=40)
@given(seeds, sizes, st.integers(1, 8))
def test_any_actions_give_an_order_that_the_simulator_takes(seed, n, most):
    graph, rng = random_graph(seed, n), Random(seed)
    stages = find_stages(graph, most)
    plain = [("backward", stage) for stage in range(len(stages) - 1, -1, -1)]
    assert stages.order(plain) == first_order(graph)
    actions = [a for back in plain for a in (*again(rng, len(stages)), back)]
    forward, backward = stages.order(actions)
    timeline = simulate(graph, with_drops(graph, forward, backward))
    runs = Counter([*forward, *backward])
    assert all(runs[op.name] <= 1 for op in graph.ops if op.kind == "pinned")
    assert timeline.seconds >= simulate(graph, keep_all(graph)).seconds


def again(rng: Random, count: int) -> list[tuple[str, int]]:
    return [("forward", rng.randrange(count)) for _ in range(rng.randint(0, 3))]


def test_a_chain_is_cut_at_every_step_and_measured():
    stages = find_stages(chain(4, size=3, seconds=2.0))
    assert [len(stage) for stage in stages.forward] == [1, 1, 1, 1]
    assert stages.crossing == (0, 3, 3, 3, 0)
    assert stages.forward_seconds == (2.0,) * 4
    # The first step's backward reads nothing that a stage wrote, so it goes with the run before it.
    assert stages.backward_seconds == (0.0, 4.0, 2.0, 2.0)
    # Each step writes the input of the next one, which the backward reads; the last one writes the output.
    assert stages.saved == (3, 3, 3, 0)
    assert stages.forward_work == (3, 3, 3, 3)


def test_rooms_count_what_is_there_at_once():
    graph = cnn(3)
    (stage,) = (stages := stages_at(graph, [])).forward
    assert stages.saved[0] > 0
    forward, _ = first_order(graph)
    assert list(stage) == forward
    given_bytes = sum(v.bytes for v in graph.values if v.kind in ("parameter", "input"))
    timeline = simulate(graph, keep_all(graph))
    room = max(timeline.resident[: timeline.boundary]) - given_bytes
    assert stages.forward_work[0] == pytest.approx(room)


def test_cuts_of_a_transformer_separate_its_blocks():
    graph = transformer(6, dropout=False)
    stages = find_stages(graph)
    cheapest = min(stages.crossing[1:-1])
    blocks = sum(crossing == cheapest for crossing in stages.crossing[1:-1])
    assert blocks >= 6
    assert len(find_stages(graph, 1)) == 1
    assert len(find_stages(graph, 7)) == 7


def test_stages_at_given_places():
    graph = chain(6)
    stages = stages_at(graph, [2, 5])
    assert [len(stage) for stage in stages.forward] == [2, 3, 1]
    assert all(stages.recomputable[i] == stages.forward[i] for i in range(3))
    assert joined(stages) == first_order(graph)
    bounds = [0, 2, 5, 6]
    assert [b - a for a, b in pairwise(bounds)] == [len(stage) for stage in stages.forward]


def test_a_graph_without_ops_is_one_empty_stage():
    stages = find_stages(Graph((), ()))
    assert stages.forward == stages.backward == ((),)
    assert stages.crossing == (0, 0)
    assert stages.order([("forward", 0), ("backward", 0)]) == ([], [])
