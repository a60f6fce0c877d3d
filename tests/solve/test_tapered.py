"""Sequences in bytes: leaves that taper off, against the full recurrence over carries and recordings."""

import functools
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lowtide.errors import LowtideError
from lowtide.sequences.ledger import peak_of
from lowtide.sequences.planned_scan import make_scan_plan
from lowtide.sequences.sizes import Sizes
from lowtide.solve.sequence import Backward, Forward, forward_count
from lowtide.solve.sequence.actions import stream
from lowtide.solve.sequence.tapered import SHORT, Tapered, leaf_sizes

NEVER = 10**9


def least_runs(steps, room, state, record):
    """All that the paper's mixed strategy may do, in bytes: states and recordings, in any order."""

    @functools.cache
    def runs(t, m):
        if t <= 1:
            return t
        ways = [NEVER]
        if m >= record:  # record the next step, whose carry is there
            ways.append(1 + runs(t - 1, m - record))
        if m >= state:
            ways += [y + runs(t - y, m - state) + runs(y, m) for y in range(1, t)]
        if m >= state + record:  # record a step further on, which holds the carry before it as well
            ways += [y + runs(t - y, m - state - record) + runs(y - 1, m) for y in range(2, t)]
        return min(ways)

    return runs(steps, room)


def least_tree(steps, leaves):
    @functools.cache
    def runs(t, level):
        if t <= leaves[level]:
            return t
        if level == len(leaves) - 1:
            return NEVER
        return min(y + runs(t - y, level + 1) + runs(y, level) for y in range(1, t))

    return runs(steps, 0)


sizes = st.tuples(st.integers(1, 28), st.integers(0, 60), st.integers(1, 6), st.integers(1, 8))


@settings(max_examples=150)
@example((13, 10, 4, 3))  # 35 runs, where 34 are possible
@given(sizes)
def test_leaves_are_as_good_as_any_mix_of_states_and_recordings(case):
    """Where a recording takes no less than a state, as it does that has one in it; else a few runs more."""
    steps, room, state, record = case
    best = least_runs(steps, room, state, record)
    leaves = leaf_sizes(steps, room=room, state=state, record=record)
    if best >= NEVER:
        with pytest.raises(LowtideError, match="room for no state"):
            Tapered(steps, leaves)
    elif record >= state:
        assert Tapered(steps, leaves).forward_count == best
    else:
        assert best <= Tapered(steps, leaves).forward_count <= 1.1 * best


@settings(max_examples=60)
@given(st.integers(SHORT + 1, 110), st.integers(2, 200), st.integers(1, 6), st.integers(1, 8))
def test_long_parts_are_near_the_best_tree(steps, room, state, record):
    leaves = leaf_sizes(steps, room=room, state=state, record=record)
    if len(leaves) < 2:
        return
    best = least_tree(steps, leaves)
    found = Tapered(steps, leaves).forward_count
    assert best <= found <= 1.05 * best
    if best <= 2 * steps - 1:  # two runs per step have a closed form
        assert found == best


@pytest.mark.parametrize("slots", [1, 2, 3, 7])
@pytest.mark.parametrize("steps", [1, 2, 10, 39])
def test_leaves_of_one_step_are_the_hidden_strategy(steps, slots):
    assert Tapered(steps, [1] * (slots + 1)).forward_count == forward_count(steps, slots)


def test_the_headline():
    """At 5 % of the memory for internal states, less than two runs per step, however large a carry is."""
    for state, record in ((1, 1), (1, 5), (2, 9)):
        leaves = leaf_sizes(1000, room=50 * record, state=state, record=record)
        assert Tapered(1000, leaves).forward_count <= 1975
    leaves = leaf_sizes(1000, room=20 * 5, state=1, record=5)
    assert Tapered(1000, leaves).forward_count < 2000  # at 2 %


@settings(max_examples=80)
@given(sizes, st.integers(0, 9), st.integers(0, 9), st.integers(0, 5), st.integers(0, 3))
def test_plans_take_as_many_runs_as_they_say_and_stay_below_their_budget(case, run, back, gradient, random):
    steps, room, state, record = case
    found = Sizes(state + random, record, record + run, record + gradient + back, gradient, random)
    least = make_scan_plan(steps, sizes=found, budget="min")
    for strategy in ("auto", "hidden", "internal", "mixed"):
        budget = max(least.peak, found.work + room, found.work + found.state)
        plan = make_scan_plan(steps, sizes=found, budget=budget, strategy=strategy)
        actions = list(plan.actions())
        assert sum(a.stop - a.start for a in actions if isinstance(a, Forward)) == plan.forward_count
        assert [a.step for a in actions if isinstance(a, Backward)] == list(range(steps))[::-1]
        assert plan.peak == peak_of(actions, found) <= budget


@pytest.mark.slow
def test_a_larger_budget_never_takes_more_runs():
    found = Sizes(state=3, record=7, run=9, backward=12, gradient=3)
    runs = [make_scan_plan(500, sizes=found, budget=budget).forward_count for budget in range(15, 3600, 7)]
    assert all(later <= 1.01 * earlier for earlier, later in pairwise(runs))
    assert runs[-1] == 500


@pytest.mark.parametrize("steps", [100_000, 1_000_000])
def test_long_sequences_are_planned(steps):
    found = Sizes(state=128, record=1024, run=1200, backward=2000, gradient=128)
    plan = make_scan_plan(steps, chunk=steps // 4000, sizes=found, budget="2%")
    assert plan.peak <= 0.02 * plan.keep_all
    assert plan.forward_count < 3 * steps


def test_streams_of_tapered_problems_go_back_through_every_step():
    problem = Tapered(30, (3, 2, 1))
    actions = list(stream(problem, [(0, 30, 3)], at=0))
    assert [a.step for a in actions if isinstance(a, Backward)] == list(range(30))[::-1]
