"""Loops of unknown length: followed state by state, replayed, counted against the best and the offline."""

from collections import Counter
from functools import cache
from itertools import combinations, islice, pairwise
from math import comb

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.errors import LowtideError
from lowtide.solve.sequence import Backward, Forward, Load, Pop, Push, forward_count, replay
from lowtide.solve.sequence.online import Choice, Online, finish, online_count

runs_of_part = cache(forward_count)


def loops(slots, most):
    """A loop that stops after 1, 2, ... `most` steps: the steps, what is held then, and the chooser."""
    online, held = Online(slots), set()
    for state in range(most):
        choice = online.leave(state)
        if choice.free is not None:
            assert choice.keep
            held.remove(choice.free)
        if choice.keep:
            held.add(state)
        assert 0 in held
        assert len(held) <= slots
        assert online.kept == tuple(sorted(held))
        yield state + 1, online.kept, online


def stopped(steps, slots):
    *_, last = loops(slots, steps)
    return last[1]


def whole(kept, steps, slots):
    """The loop as one stream of actions: the first pass, in which only what is kept to its end is stored."""
    for start, stop in pairwise([*kept, steps]):
        if start:
            yield Push(start)
        yield Forward(start, stop)
    yield from finish(kept, steps, slots)


def most_runs(kept, steps, slots):
    """How often the step that runs most often runs, the first pass included."""
    runs = Counter()
    for action in whole(kept, steps, slots):
        if isinstance(action, Forward):
            runs.update(range(action.start, action.stop))
    assert len(runs) == steps
    return max(runs.values())


def count(kept, steps, slots):
    parts = enumerate(pairwise([*kept, steps]))
    return steps + sum(runs_of_part(stop - start, slots - place) for place, (start, stop) in parts)


def choices(steps, slots):
    """All that a loop may have kept."""
    return ((0, *more) for n in range(slots) for more in combinations(range(1, steps), n))


def least_count(steps, slots):
    """The runs of a sequence with one step more, which is not run: no step goes backward from a first run."""
    return runs_of_part(steps + 1, slots) - 1


def least_reruns(steps, slots):
    return next(r for r in range(steps + 1) if steps < comb(slots + r, slots))


@pytest.mark.parametrize("slots", range(1, 7))
def test_loops_are_replayed_and_their_steps_run_no_more_often_than_bounded(slots):
    for steps, kept, online in loops(slots, 60):
        assert replay(whole(kept, steps, slots), steps, slots) == online_count(steps, slots)
        most = most_runs(kept, steps, slots)
        assert most <= online.reruns + 1
        least = least_reruns(steps, slots)
        if least <= 2:
            assert most == least + 1
        assert most <= least + 2


# Two recomputations at most: while steps < binom(slots + 2, 2), slots counting the start state's.


@pytest.mark.parametrize("slots", [*range(2, 10), 15, 20, 30])
@pytest.mark.parametrize("reruns", [1, 2])
def test_the_bound_of_one_and_of_two_recomputations_is_exact(slots, reruns):
    bound = comb(slots + reruns, reruns)
    for steps in (bound // 2 + 1, bound - 2, bound - 1):
        assert most_runs(stopped(steps, slots), steps, slots) <= reruns + 1
    assert most_runs(stopped(bound, slots), bound, slots) == reruns + 2


@pytest.mark.parametrize(("slots", "reruns"), [(2, 1), (2, 2), (2, 3), (3, 1), (3, 2), (4, 1)])
def test_no_choice_of_states_has_a_wider_bound(slots, reruns):
    bound = comb(slots + reruns, reruns)
    for steps, most in ((bound - 1, reruns + 1), (bound, reruns + 2)):
        assert min(most_runs(one, steps, slots) for one in choices(steps, slots)) == most


def test_two_recomputations_last_for_hundreds_of_slots():
    for slots in (100, 300):
        steps = comb(slots + 2, 2) - 1
        online = Online(slots)
        for state in range(steps):
            online.leave(state)
        assert online.reruns == 2
        assert online.leave(steps) == Choice(False, None)
        assert online.reruns == 3


@pytest.mark.parametrize("slots", range(1, 13))
def test_reruns_are_at_most_one_above_the_least(slots):
    for steps, _, online in loops(slots, 1500):
        least = least_reruns(steps, slots)
        assert least <= online.reruns <= least + 1
        if least <= 2:
            assert online.reruns == least


def test_no_choice_of_states_takes_fewer_runs_than_the_least_count():
    for steps in range(1, 10):
        for slots in range(1, 5):
            found = min(count(one, steps, slots) for one in choices(steps, slots))
            assert found == least_count(steps, slots)


@pytest.mark.parametrize("slots", range(1, 13))
def test_the_count_is_the_least_up_to_two_recomputations_and_near_it_beyond(slots):
    for steps, kept, _ in loops(slots, 1500):
        found, least = count(kept, steps, slots), least_count(steps, slots)
        if steps < comb(slots + 2, 2):
            assert found == least
        assert least <= found <= (1.1 if slots < 5 else 1.06) * least


@pytest.mark.parametrize(("slots", "most"), [(20, 4000), (50, 40_000)])
def test_the_count_is_near_the_least_with_many_slots(slots, most):
    for steps, kept, _ in loops(slots, most):
        if steps % 37 == 0:
            assert count(kept, steps, slots) <= 1.065 * least_count(steps, slots)


def test_the_count_beside_that_of_a_sequence_of_known_length():
    ratios = {}
    for slots in range(1, 13):
        for steps, kept, _ in loops(slots, 300):
            offline = forward_count(steps, slots)
            found = count(kept, steps, slots)
            ratios[steps, slots] = found / offline
            assert offline < found <= 1.1 * (offline + least_reruns(steps, slots))
    # A single step runs twice instead of once; from ten steps on it is a fifth at most.
    assert max(ratios.values()) == ratios[1, 1] == 2
    assert max(ratio for (steps, _), ratio in ratios.items() if steps >= 10) == pytest.approx(1.2)


def test_one_slot_has_the_start_state_only():
    for steps, kept, online in loops(1, 30):
        assert kept == (0,)
        assert online.reruns == steps
        assert online_count(steps, 1) == steps + steps * (steps + 1) // 2


def test_a_slot_for_every_state_keeps_all():
    for steps, kept, online in loops(40, 40):
        assert kept == tuple(range(steps))
        assert online.reruns == 1
        assert online_count(steps, 40) == 2 * steps


def test_no_step_and_one():
    assert Online(3).kept == ()
    assert online_count(0, 3) == 0
    assert list(finish((), 0, 3)) == list(finish((0,), 0, 3)) == []
    assert online_count(1, 3) == 2
    assert list(finish([0], 1, 3)) == [Load(0), Forward(0, 1), Backward(0)]


def test_a_short_loop_by_hand():
    online = Online(2)
    assert [online.leave(state) for state in range(4)] == [
        (True, None),
        (True, None),
        (False, None),
        (True, 1),
    ]
    assert list(finish((0, 2), 4, 2)) == [
        *(Load(2), Forward(2, 4), Backward(3), Load(2), Forward(2, 3), Backward(2), Pop(2)),
        *(Load(0), Forward(0, 1), Push(1), Forward(1, 2), Backward(1), Pop(1)),
        *(Load(0), Forward(0, 1), Backward(0)),
    ]


def test_a_last_state_that_is_kept_is_freed_first():
    stream = list(finish((0, 1, 2), 2, 3))
    assert stream[0] == Pop(2)
    assert replay([Forward(0, 1), Push(1), Forward(1, 2), Push(2), *stream], 2, 3) == 4


@settings(max_examples=60)
@given(st.data(), st.integers(1, 150), st.integers(1, 30))
def test_any_kept_states_are_finished(data, steps, slots):
    more = data.draw(st.sets(st.integers(1, steps - 1), max_size=slots - 1)) if steps > 1 else set()
    kept = (0, *sorted(more))
    assert next(finish(kept, steps, slots)) == Load(kept[-1])
    assert replay(whole(kept, steps, slots), steps, slots) == count(kept, steps, slots)


@settings(max_examples=25)
@given(st.integers(1, 900), st.integers(1, 60))
def test_longer_loops_are_replayed(steps, slots):
    kept = stopped(steps, slots)
    assert replay(whole(kept, steps, slots), steps, slots) == online_count(steps, slots)


@pytest.mark.slow
@pytest.mark.parametrize("slots", [2, 30])
def test_a_million_steps(slots):
    steps = 10**6
    online = Online(slots)
    for state in range(steps):
        online.leave(state)
    assert count(online.kept, steps, slots) <= 1.05 * least_count(steps, slots)
    assert next(islice(finish(online.kept, steps, slots), 1)) == Load(online.kept[-1])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Online(0), "slots=0 must be a whole number of at least 1"),
        (lambda: Online(2.0), r"slots=2\.0 is not a whole number"),
        (lambda: Online(2).leave(1), "state=1 is left, but state 0 is next"),
        (lambda: online_count(-1, 2), "steps=-1 must be a whole number of at least 0"),
        (lambda: online_count(3, True), "slots=True must be"),
        (lambda: finish([0], "3", 2), "steps='3' is not a whole number"),
        (lambda: finish([0], 3, 0), "slots=0 must be"),
        (lambda: finish([0, 1, 2], 3, 2), "3 states are kept, above slots=2"),
        (lambda: finish([], 3, 2), r"kept=\[\] does not begin with the start state 0"),
        (lambda: finish([1, 2], 3, 2), r"kept=\[1, 2\] does not begin with the start state 0"),
        (lambda: finish([0, 4], 3, 2), "state 4 is kept, above steps=3"),
        (lambda: finish([0, 2, 1], 3, 3), "state 2 is kept before state 1: kept states must rise"),
        (lambda: finish([0, 2, 2], 3, 3), "state 2 is kept before state 2: kept states must rise"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(LowtideError, match=message):
        call()
