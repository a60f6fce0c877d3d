"""Placement in an arena against brute force, and the least arena that torch's best fit is content with."""

from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fragmentation
import hard_limit
import placement
from graphs import chain
from lowtide.devices.memory import DeviceMemory
from lowtide.planner.under_budget import plan_graph
from placement import Arena, Stay, best_arena, first_fit, height, live_peak
from steering import steer

MIB = 2**20

spans = st.tuples(st.integers(1, 6), st.integers(0, 6), st.integers(1, 4))
stays = st.lists(spans.map(lambda span: Stay(span[0], span[1], span[1] + span[2])), min_size=1, max_size=6)


def met(found, offsets):
    """Pairs that are alive together and overlap."""
    parts = list(zip(found, offsets, strict=True))
    return [
        (one, other)
        for at, (one, low) in enumerate(parts)
        for other, high in parts[:at]
        if one.start < other.end and other.start < one.end
        if low < high + other.size and high < low + one.size
    ]


@settings(max_examples=60)
@given(stays)
def test_no_two_meet_and_the_arena_is_between_the_bound_and_every_order(found):
    order = range(len(found))
    assert not met(found, first_fit(found, list(order)))
    arena = best_arena(found)
    size = arena.size
    assert arena.order in placement.ORDERS
    assert not met(found, arena.offsets)
    assert height(found, arena.offsets) == size
    assert live_peak(found) <= size
    best = min(height(found, first_fit(found, each)) for each in permutations(order))  # some order is optimal
    assert best <= size <= height(found, first_fit(found, sorted(order, key=lambda at: -found[at].size)))


def test_the_most_alive_at_once_by_counting():
    found = [Stay(3, 0, 4), Stay(5, 1, 2), Stay(4, 2, 6), Stay(1, 3, 9)]
    alive = [sum(stay.size for stay in found if stay.start <= now < stay.end) for now in range(9)]
    assert live_peak(found) == max(alive) == 8


@settings(max_examples=60)
@given(stays, st.integers(0, 5))
def test_requests_are_steered_to_their_offsets(found, odd):
    """In the second step as in the first; no more is reserved than the arena in whole pages."""
    found = [Stay(stay.size * (3 * MIB + 512 * odd), stay.start, stay.end) for stay in found]
    arena = best_arena(found)
    steered = steer(found, arena)
    assert (steered.misplaced, len(steered.plugs)) == (0, 2 * len(found))
    assert steered.allocator.reserved_peak == -(-arena.size // (20 * MIB)) * 20 * MIB
    assert steered.allocator.allocated == 0


def test_a_request_that_cannot_lie_where_it_was_planned_is_counted():
    found = [Stay(3 * MIB, 0, 3), Stay(3 * MIB, 1, 3)]
    assert steer(found, Arena(6 * MIB, "size", [0, 2 * MIB])).misplaced == 2  # one in each step


@pytest.mark.parametrize(
    "budget", [None, *(pytest.param(each, marks=pytest.mark.slow) for each in ("60%", "min"))]
)
def test_the_least_arena_serves_and_is_no_smaller_than_what_is_alive(budget):
    plan = plan_graph(chain(12, size=3 * MIB), budget, device=DeviceMemory("cuda", blocks=()))
    live = live_peak(fragmentation.recorded(plan))
    size = fragmentation.least_arena(plan, live)
    assert live <= size <= fragmentation.WAYS["default"](plan)
    assert fragmentation.in_arena(plan, live // 2) is None


@pytest.mark.slow
def test_a_trial_of_a_hard_limit_is_foretold_and_run():
    """Foretold for a GPU, and run on the CPU; a budget that is too small is an outcome, too."""
    (foretold,) = hard_limit.foretold("resnet50", ("min",), tiny=True)
    assert foretold["outcome"] == "ok"
    assert foretold["plan_allocated"] <= foretold["reserved"] <= foretold["plan_reserved"]
    assert foretold["plan_reserved"] <= foretold["budget"]
    trial = hard_limit.Trial("resnet50", ("min",), "eager", "", tiny=True)
    (row,) = hard_limit.outcomes(trial, "cpu")
    assert (row["outcome"], row["plan_allocated"], row["plan_reserved"]) == ("ok", row["budget"], None)
    refused = hard_limit.happened(trial, row["budget"] // 2, "cpu")
    assert refused["outcome"] == "refused"
    assert row["budget"] // 2 < refused["smallest"] <= row["budget"]
