"""Plans whose reserved bytes keep to a budget, with an arena where that helps."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lowtide
from graphs import chain, random_graph
from lowtide.devices.allocator_settings import AllocatorSettings
from lowtide.devices.caching_allocator import Segment
from lowtide.devices.memory import DeviceMemory
from lowtide.devices.reserved import Loop
from lowtide.planner.arenas import allocated_alone, least_reserving, reserving, within
from lowtide.planner.under_budget import plan_graph
from lowtide.plans.events import events
from lowtide.plans.graph import Graph, Op, Value
from lowtide.plans.keep_all import keep_all
from lowtide.plans.planned_step import make_plan

MIB = 2**20
CUDA = DeviceMemory("cuda", blocks=())


def large(seed, n, size=3):
    """A random graph with values of a few MiB, which the allocator serves from its large pool."""
    graph = random_graph(seed, n)
    values = tuple(replace(value, bytes=value.bytes * size * MIB) for value in graph.values)
    return Graph(graph.ops, values)


def replayed(plan, **more):
    """What a loop over the plan reserves, with its arena."""
    return Loop(plan.graph, events(plan.graph, plan.schedule), **more).peaks(arena=plan.arena).reserved


@pytest.mark.slow
@settings(max_examples=12)
@given(st.integers(0, 10_000), st.integers(4, 14), st.floats(0.3, 1.2))
def test_a_budget_bounds_what_is_reserved_or_is_refused_with_one_that_does(seed, n, share):
    graph = large(seed, n)
    asked = budget = int(plan_graph(graph, None, device=CUDA).allocated * share)
    try:
        plan = plan_graph(graph, asked, device=CUDA)
    except lowtide.BudgetTooSmall as error:
        budget = error.smallest
        plan = plan_graph(graph, budget, device=CUDA)
    assert plan.allocated <= replayed(plan) <= plan.peak <= budget


@pytest.mark.slow
@settings(max_examples=12)
@given(st.integers(0, 10_000), st.integers(4, 14))
def test_the_smallest_peak_reserves_no_more_than_the_same_plan_without_an_arena(seed, n):
    graph = large(seed, n)
    plan = plan_graph(graph, "min", device=CUDA)
    loose = plan_graph(graph, "min", device=replace(CUDA, replays=False))
    beside = 4 * MIB  # two segments of small requests, which a plan under a budget leaves free
    assert plan.peak <= reserving(loose, CUDA).peak + beside
    assert replayed(plan) <= plan.peak


def test_an_arena_is_taken_where_the_limit_needs_one():
    """The segment of 40 MiB holds one of the two values of 22 MiB that follow, one of 44 MiB both."""
    sizes = {"x": 1, "a": 40, "d": 1, "b": 22, "c": 22, "g": 1}
    kinds = {"x": "input", "g": "gradient"}
    values = tuple(Value(name, size * MIB, kinds.get(name, "activation")) for name, size in sizes.items())
    ops = (
        Op("a", ("x",), ("a",)),
        Op("d", ("a",), ("d",)),
        Op("b", ("d",), ("b",)),
        Op("c", ("d",), ("c",)),
        Op("g", ("b", "c"), ("g",), phase="backward"),
    )
    graph = Graph(ops, values)
    plan = make_plan(graph, keep_all(graph), method="keep_all")
    plain = reserving(plan, CUDA)
    tight = plain.peak - 8 * MIB
    found = within(plan, CUDA, tight)
    assert found.arena > 0
    assert plan.allocated <= found.peak <= tight < plain.peak
    assert within(plan, CUDA, plain.peak).arena == 0  # what keeps everything takes one only where it must
    assert replayed(found) <= found.peak
    assert within(plan, CUDA, plan.allocated).peak > plan.allocated  # none is small enough for that


@pytest.mark.slow
def test_expandable_segments_need_no_arena():
    device = replace(CUDA, settings=AllocatorSettings(expandable=True))
    for budget in (None, "70%", "min"):
        assert plan_graph(chain(12, size=5 * MIB), budget, device=device).arena == 0


def test_where_reserved_bytes_are_not_bounded_a_note_says_why():
    other = replace(CUDA, settings=AllocatorSettings(native=False))
    assert allocated_alone(CUDA, "") == ()
    assert allocated_alone(DeviceMemory("cpu"), "ranks plan alike") == ()
    assert "ranks plan alike" in allocated_alone(CUDA, "ranks plan alike")[0]
    assert "another allocator than torch's own" in allocated_alone(other, "")[0]


def test_without_replay_the_budget_bounds_what_is_allocated():
    graph = chain(12, size=5 * MIB)
    plan = plan_graph(graph, "70%", device=replace(CUDA, replays=False))
    assert (plan.reserved, plan.arena) == (None, 0)
    assert plan.peak == plan.allocated <= plan.budget


@pytest.mark.parametrize("budget", ["100%", "130%"])
def test_a_share_of_all_or_more_is_the_uncapped_step(budget):
    graph = chain(12, size=5 * MIB)
    whole = plan_graph(graph, None, device=CUDA)
    plan = plan_graph(graph, budget, device=CUDA)
    assert plan.is_plain
    assert plan.peak == whole.peak <= plan.budget


def test_of_plans_by_rising_bytes_the_one_that_reserves_least():
    graph = chain(12, size=5 * MIB)
    plans = [
        plan_graph(graph, budget, device=replace(CUDA, replays=False)) for budget in ("min", "60%", "90%")
    ]
    best = least_reserving(plans, CUDA)
    assert best.peak == min(least_reserving([plan], CUDA).peak for plan in plans)


@pytest.mark.slow
def test_what_earlier_steps_left_in_an_arena_is_told_where_it_is_in_the_way():
    """Every second MiB is taken: no request of 5 MiB fits, and the arena cannot go back."""
    graph = chain(12, size=5 * MIB)
    whole = plan_graph(graph, None, device=CUDA)
    taken = tuple((2 * MIB, place % 2 == 0) for place in range(whole.allocated // (2 * MIB)))
    device = replace(CUDA, segments=(Segment(0, taken),), has_run=True)
    with pytest.raises(lowtide.BudgetTooSmall):
        plan_graph(graph, "60%", device=replace(device, has_run=False))
    plan = plan_graph(graph, "60%", device=device)
    assert plan.reserved is None
    assert "what earlier steps have left on the device is in the way" in plan.notes[-1]


@pytest.mark.slow
@settings(max_examples=6)
@given(st.integers(0, 10_000), st.floats(0.4, 0.9), st.integers(2, 9))
def test_beside_what_earlier_steps_left_a_budget_is_kept_or_told_or_refused(seed, share, apart):
    graph = large(seed, 10)
    whole = plan_graph(graph, None, device=CUDA)
    taken = tuple((2 * MIB, place % apart == 0) for place in range(whole.allocated // (4 * MIB)))
    device = replace(CUDA, segments=(Segment(0, taken),), has_run=True)
    budget = int(whole.allocated * share)
    try:
        plan = plan_graph(graph, budget, device=device)
    except lowtide.BudgetTooSmall as refused:
        plan = plan_graph(graph, refused.smallest, device=device)
        budget = refused.smallest
    told = any("in the way" in note for note in plan.notes)
    assert told == (plan.reserved is None)
    assert plan.allocated <= budget
    assert told or plan.peak <= budget


@pytest.mark.slow
def test_what_one_method_found_is_not_given_to_those_who_ask_another():
    graph = chain(12, size=5 * MIB)
    with pytest.raises(lowtide.BudgetTooSmall):
        plan_graph(graph, MIB, device=CUDA)
    with pytest.raises(lowtide.BudgetTooSmall) as segments:
        plan_graph(graph, MIB, method="sqrt_segments", device=CUDA)
    with pytest.raises(lowtide.BudgetTooSmall) as auto:
        plan_graph(graph, MIB, device=CUDA)
    assert auto.value.smallest <= segments.value.smallest
    assert (
        plan_graph(graph, segments.value.smallest, method="sqrt_segments", device=CUDA).method
        == "sqrt_segments"
    )


def test_an_arena_is_written_and_read_with_its_plan():
    plan = plan_graph(large(3, 12), "min", device=CUDA)
    with_arena = replace(plan, arena=6 * MIB)
    assert lowtide.Plan.from_json(with_arena.to_json()) == with_arena
    with pytest.raises(lowtide.FormatError, match="arena"):
        lowtide.Plan.from_dict({**plan.to_dict(), "arena": "much"})
