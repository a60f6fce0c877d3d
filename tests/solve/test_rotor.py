"""Rotor: the table against brute force and against Gruslys, and its form for graphs through the simulator."""

from __future__ import annotations

import heapq
import re
from collections import Counter
from dataclasses import dataclass
from functools import cache
from itertools import count
from math import comb, inf
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphs import chain, cnn, random_graph, transformer
from lowtide.errors import BudgetTooSmall, LowtideError
from lowtide.plans.graph import GIVEN_KINDS, Graph, Op, Value
from lowtide.plans.keep_all import keep_all
from lowtide.plans.order import first_order, with_drops
from lowtide.plans.schedule import Run
from lowtide.plans.simulator import simulate
from lowtide.solve import sqrt_segments
from lowtide.solve.chain_stages import find_stages
from lowtide.solve.rotor import (
    Action,
    ChainTable,
    Option,
    Stage,
    chain_frontier,
    plan_chain,
    rotor,
    rotor_orders,
)
from lowtide.solve.rotor.blocks import Blocks, choose_cuts
from lowtide.solve.rotor.sizes import ChainSizes
from oracle import best_seconds

seeds = st.integers(0, 10_000)


@dataclass(frozen=True)
class Case:
    """A tiny chain whose a(i) are sets of named values, so that what they share is seen as such."""

    stages: tuple[Stage, ...]
    inputs: tuple[frozenset[str], ...]
    size: dict[str, int]

    def shared(self) -> list[list[int]]:
        return [[sum(self.size[v] for v in a & b) for b in self.inputs] for a in self.inputs]


def random_case(seed: int) -> Case:
    rng = Random(seed)
    n = rng.randint(1, 4)
    spans = {f"v{i}": (i, rng.choice([i, i, rng.randint(i, n)])) for i in range(n + 1)}
    size = {name: rng.randint(0, 3) for name in spans}
    inputs = tuple(frozenset(v for v, (low, high) in spans.items() if low <= i <= high) for i in range(n + 1))
    stages = []
    for i in range(n):
        options = [random_option(rng, i, i + 1, inputs, size)]
        for _ in range(rng.randint(0, 2)):
            options.append(random_option(rng, i, rng.randint(i + 1, n), inputs, size))
        output = sum(size[v] for v in inputs[i + 1])
        seconds, leaves = rng.choice([1.0, 2.0, 5.0]), rng.choice([0, 0, 1])
        stages.append(
            Stage(output, tuple(options), seconds, rng.randint(0, 1), rng.choice([None, 0, 2]), leaves)
        )
    return Case(tuple(stages), inputs, size)


def random_option(rng: Random, first: int, end: int, inputs: tuple[frozenset[str], ...], size) -> Option:
    closes = end - first > 0 and rng.random() < 0.2 and end < len(inputs) - 1
    fresh = 0 if closes else sum(size[v] for v in inputs[end] - inputs[first])
    saved = fresh + rng.randint(0, 3)
    times = rng.choice([1.0, 2.0, 6.0]), rng.choice([1.0, 3.0, 7.0])
    return Option(saved, *times, rng.randint(0, 2), rng.randint(0, 2), end - first, closes)


def shortest(case: Case, memory: int) -> float:
    """The least seconds by Dijkstra over (stages left, transient a, stored a's, saved blocks)."""
    ties = count()
    heap = [(0.0, next(ties), (len(case.stages) - 1, None, frozenset(), frozenset()))]
    done = set()
    while heap:
        seconds, _, state = heapq.heappop(heap)
        if state in done:
            continue
        done.add(state)
        if state[0] < 0:
            return seconds
        for extra, peak, after in moves(case, *state):
            if peak <= memory and after not in done:
                heapq.heappush(heap, (seconds + extra, next(ties), after))
    return inf


def moves(case: Case, last: int, loose: int | None, stored: frozenset, saved: frozenset):
    """(seconds, peak, state) of everything that can be done next.

    What is stored or saved stays until its backward, and work goes on after the last of it: the left part
    waits until the right one is done.
    """
    stages = case.stages
    gradient = stages[last].output if stages[last].gradient is None else stages[last].gradient
    base = gradient + sum(stage.leaves for stage in stages[last + 1 :])

    def room(loose, stored, saved) -> int:
        values = set().union(*(case.inputs[i] for i in {*stored, loose} - {None}))
        own = 0
        for first, index in saved:
            option = stages[first].options[index]
            end = first + option.stages
            fresh = sum(case.size[v] for v in case.inputs[end] - case.inputs[first])
            own += option.saved - (0 if option.closes else fresh)
            values |= set() if option.closes else case.inputs[end]
        return base + own + sum(case.size[v] for v in values - case.inputs[0])

    ends = {f + stages[f].options[o].stages for f, o in saved if not stages[f].options[o].closes}
    there = {0, loose, *stored, *ends} - {None}
    front = max([0, *stored, *(f + stages[f].options[o].stages for f, o in saved)])
    if loose is not None:
        yield 0.0, 0, (last, None, stored, saved)
        yield 0.0, 0, (last, None, stored | {loose}, saved)
    for k in (k for k in there if k >= front and loose in (None, k)):
        if k < last:
            both = room(k + 1, stored | {k}, saved)
            yield stages[k].forward, both + stages[k].temp, (last, k + 1, stored, saved)
        for index, option in enumerate(stages[k].options) if k <= last else ():
            end = k + option.stages - 1
            if end == last or (end < last and not option.closes):
                after = (None, stored | ({k} - {0}), saved | {(k, index)})
                yield option.forward, room(*after) + option.forward_temp, (last, *after)
    for first, index in saved:
        option = stages[first].options[index]
        if first + option.stages - 1 == last and first in there and loose is None:
            left = frozenset(i for i in stored if i < first)
            peak = room(None, stored, saved) + option.backward_temp
            yield option.backward, peak, (first - 1, None, left, saved - {(first, index)})


@settings(max_examples=60)
@given(seeds)
def test_the_table_is_the_optimum_of_tiny_chains_for_every_memory(seed):
    case = random_case(seed)
    table = ChainTable(case.stages, 16, shared=case.shared())
    assert table.unit == 1
    for memory in range(0, 17, 2):
        assert table.seconds[0, -1, memory] == pytest.approx(shortest(case, memory))


@settings(max_examples=100)
@given(seeds)
def test_the_actions_take_the_seconds_they_say_and_undo_each_stage_once(seed):
    case = random_case(seed)
    table = ChainTable(case.stages, 16, shared=case.shared())
    for memory in range(17):
        plan = table.plan(memory)
        if plan is None:
            continue
        seconds, undone = 0.0, []
        for verb, index, choice in plan.actions:
            stage, option = case.stages[index], case.stages[index].options[choice]
            seconds += {"forward": stage.forward, "save": option.forward, "backward": option.backward}[verb]
            if verb == "backward":
                undone += range(index + option.stages - 1, index - 1, -1)
        assert seconds == pytest.approx(plan.seconds)
        assert undone == list(range(len(case.stages) - 1, -1, -1))


def hidden_count(steps: int, slots: int) -> int:
    """The closed form of Gruslys et al. for hidden states."""
    repeats = next(r for r in count() if comb(slots + r, slots) >= steps)
    return repeats * steps - comb(slots + repeats, slots + 1) + steps


@pytest.mark.parametrize("slots", [1, 2, 3, 5, 8])
def test_equal_stages_recover_the_closed_form_for_hidden_states(slots):
    step = Stage(1, (Option(0, 1.0, 0.0, closes=True),), temp=-1, gradient=0)
    for steps in range(1, 25):
        assert plan_chain([step] * steps, slots).seconds == hidden_count(steps, slots)


@pytest.mark.parametrize("held", [1, 2, 3])
def test_equal_stages_recover_the_recurrence_for_mixed_states(held):
    @cache
    def mixed(t: int, m: int) -> float:
        if m < 0:
            return inf
        if t <= 1:
            return t
        hidden = [y + mixed(t - y, m - 1) + mixed(y, m) for y in range(1, t)]
        internal = [
            y + mixed(y - 1, m) + mixed(t - y, m - (held if y == 1 else held + 1)) for y in range(1, t + 1)
        ]
        return min(hidden + internal)

    options = Option(held, 1.0, 0.0, -held, -held), Option(0, 1.0, 0.0, closes=True)
    step = Stage(1, options, temp=-1, gradient=0)
    for steps in range(1, 16):
        for slots in range(1, 10):
            assert plan_chain([step] * steps, slots).seconds == mixed(steps, slots)


def test_keeping_all_and_the_frontier():
    stage = Stage(2, (Option(6, 1.0, 2.0), Option(3, 1.0, 2.5)))
    points = chain_frontier([stage] * 5)
    assert points[-1][1] == 15.0
    assert points == sorted(points)
    assert [s for _, s in points] == sorted((s for _, s in points), reverse=True)
    for memory, seconds in points:
        assert plan_chain([stage] * 5, memory).seconds <= seconds + 1e-9
    assert plan_chain([stage] * 2, 100).actions == (
        Action("save", 0, 0),
        Action("save", 1, 0),
        Action("backward", 1, 0),
        Action("backward", 0, 0),
    )


def test_rounding_up_never_promises_too_much():
    rng = Random(3)
    stages = [
        Stage(rng.randint(50, 99), (Option(rng.randint(100, 300)), Option(rng.randint(100, 130), 1, 2)))
        for _ in range(12)
    ]
    exact, coarse = ChainTable(stages, 1200, units=1200), ChainTable(stages, 1200, units=60)
    for memory in range(0, 1200, 20):
        assert coarse.seconds[0, -1, memory // 20] >= exact.seconds[0, -1, memory]


@given(seeds)
@settings(max_examples=60)
def test_the_least_memory_is_that_of_tiny_chains(seed):
    case = random_case(seed)
    least = ChainSizes(case.stages, case.shared()).least_memory()
    assert shortest(case, least) < inf
    assert least == 0 or shortest(case, least - 1) == inf


@pytest.mark.parametrize("units", [1, 2, 3, 5, 8, 20, 500])
def test_a_memory_that_is_too_small_is_answered_with_the_least_that_is_not(units):
    rng = Random(units)
    stages = [Stage(rng.randint(5, 9), (Option(rng.randint(5, 20)),)) for _ in range(12)]
    with pytest.raises(BudgetTooSmall) as caught:
        plan_chain(stages, 1, units=units)
    least = caught.value.smallest
    if units == 1:  # every size is the whole memory
        match = re.search(r"Try units=(\d+) and a memory of (\d+) or more", str(caught.value))
        units, said = map(int, match.groups())
        assert said == least
    assert plan_chain(stages, least, units=units).seconds < inf
    for memory in range(least):
        assert ChainTable(stages, memory, units=units).plan(memory) is None


def test_a_long_chain_is_told_its_least_memory_too():
    """Rounded up to as many units as there are stages, a memory for everything is very large."""
    with pytest.raises(BudgetTooSmall, match="of 60 stages; try 3 or more"):
        plan_chain([Stage(1, (Option(1),))] * 60, 1, units=100)


def test_bad_input_is_refused_by_name():
    stage = Stage(4, (Option(4),))
    with pytest.raises(BudgetTooSmall, match="memory 3 is too small for this chain of 4 stages") as caught:
        plan_chain([stage] * 4, 3)
    assert plan_chain([stage] * 4, caught.value.smallest).seconds > 0
    with pytest.raises(LowtideError, match="stage 1 has no option"):
        plan_chain([stage, Stage(1, ())], 10)
    with pytest.raises(LowtideError, match="stage 0: every option reaches past the last stage"):
        plan_chain([Stage(1, (Option(1, stages=2),))], 10)
    with pytest.raises(LowtideError, match="memory -1"):
        plan_chain([stage], -1)
    assert plan_chain([], 0).actions == ()


@pytest.mark.slow
@settings(max_examples=40)
@given(seeds, st.integers(1, 25), st.floats(0.0, 1.1))
def test_every_schedule_is_accepted_and_pinned_ops_run_once(seed, n, share):
    graph = random_graph(seed, n)
    top = simulate(graph, keep_all(graph))
    schedule = rotor(graph, int(top.peak * share))
    timeline = simulate(graph, schedule)
    assert timeline.peak <= top.peak
    assert share < 1 or schedule == keep_all(graph)
    runs = Counter(step.op for step in schedule.steps if isinstance(step, Run))
    assert all(runs[op.name] == 1 for op in graph.ops if op.kind == "pinned")


def test_graphs_without_ops_or_without_a_backward():
    assert rotor(Graph((), ()), 0) == keep_all(Graph((), ()))
    values = Value("x", 4, "input"), Value("a", 4), Value("y", 4, "output")
    graph = Graph((Op("f", ("x",), ("a",)), Op("g", ("a",), ("y",))), values)
    assert rotor(graph, 0) == keep_all(graph)
    assert list(rotor_orders(graph)) == [first_order(graph)]


@pytest.mark.parametrize("steps", [4, 6])
def test_chains_of_equal_steps_are_planned_as_well_as_possible(steps):
    graph = chain(steps)
    top = simulate(graph, keep_all(graph))
    for budget in range(4, top.peak + 1):
        best = best_seconds(graph, budget)
        timeline = simulate(graph, rotor(graph, budget))
        assert (timeline.peak <= budget) == (best is not None)
        if best is not None:
            assert timeline.seconds == pytest.approx(best)


@pytest.mark.slow
@pytest.mark.parametrize("graph", [transformer(6), cnn(8)], ids=["transformer", "cnn"])
def test_blocks_beat_segments_at_every_budget_and_go_lower(graph):
    top = simulate(graph, keep_all(graph))
    floor = simulate(graph, rotor(graph, 0)).peak
    assert floor < simulate(graph, sqrt_segments(graph, 0)).peak
    for percent in (75, 50, 20):
        budget = floor + (top.peak - floor) * percent // 100
        mine = simulate(graph, rotor(graph, budget))
        theirs = simulate(graph, sqrt_segments(graph, budget))
        assert mine.peak <= budget
        assert theirs.peak > budget or mine.seconds < theirs.seconds


@pytest.mark.slow
def test_orders_are_different_and_reach_from_keeping_all_to_the_floor():
    graph = cnn(8)
    orders = list(rotor_orders(graph))
    assert orders[0] == first_order(graph)
    assert 15 <= len(orders) <= 30
    assert len({tuple(backward) for _, backward in orders}) == len(orders)
    peaks = [simulate(graph, with_drops(graph, *order)).peak for order in orders]
    assert min(peaks) <= 1.02 * simulate(graph, rotor(graph, 0)).peak
    assert list(rotor_orders(graph)) == orders


def test_the_model_of_a_graph_is_near_the_simulator():
    graph = transformer(6, dropout=False)
    blocks = Blocks(find_stages(graph, 20), widths=(1, 2, 3), ways=6)
    table = ChainTable(blocks.chain, blocks.ample, shared=blocks.shared())
    given_bytes = sum(value.bytes for value in graph.values if value.kind in GIVEN_KINDS)
    for memory, seconds in table.frontier()[::10]:
        timeline = simulate(graph, with_drops(graph, *blocks.order(table.plan(memory).actions)))
        assert timeline.peak <= 1.03 * (memory + given_bytes)
        assert timeline.seconds == pytest.approx(seconds, rel=0.03)


def test_equal_blocks_get_their_ways_once():
    graph = transformer(12, dropout=False)
    blocks = Blocks(find_stages(graph), widths=(1, 2), ways=4)
    ways = [way for found in blocks.ways for way, _ in found]
    assert len({id(way) for way in ways}) < len(ways) / 3


def test_cuts_fall_between_the_blocks_of_a_residual_network():
    graph = cnn(8, shrink=100)
    forward, _ = first_order(graph)
    cuts = choose_cuts(graph, 9)
    assert 6 <= len(cuts) <= 8
    assert sum(forward[cut - 1].startswith(("add", "relu")) for cut in cuts) >= len(cuts) - 1
    assert choose_cuts(graph, 1) == []
