"""One budget over units: the knapsack against trying everything."""

from itertools import product
from math import inf

from hypothesis import given
from hypothesis import strategies as st

from lowtide.planner.unit_split import Choice, Moment, knee_peak, peak_of, smallest, split, undominated

numbers = st.integers(0, 12)
choices = st.builds(Choice, numbers, numbers, st.integers(1, 9).map(float))
moments = st.lists(
    st.builds(Moment, numbers, numbers, st.lists(choices, min_size=1, max_size=3).map(tuple)), max_size=4
)


def every(steps, end):
    """All ways to choose: their peak and their seconds."""
    for chosen in product(*(range(len(step.choices)) for step in steps)):
        seconds = sum(step.choices[place].seconds for step, place in zip(steps, chosen, strict=True))
        yield peak_of(steps, end, chosen), seconds


@given(moments, numbers, st.integers(0, 50))
def test_split_is_the_fastest_way_under_a_budget(steps, end, budget):
    chosen = split(steps, end, budget)
    fitting = [seconds for peak, seconds in every(steps, end) if peak <= budget]
    if chosen is None:
        assert not fitting
        return
    assert peak_of(steps, end, chosen) <= budget
    took = sum(step.choices[place].seconds for step, place in zip(steps, chosen, strict=True))
    assert took == min(fitting)


@given(moments, numbers)
def test_smallest_has_the_smallest_peak(steps, end):
    assert peak_of(steps, end, smallest(steps, end)) == min(peak for peak, _ in every(steps, end))


@given(st.lists(choices, min_size=1, max_size=8))
def test_undominated_keeps_what_nothing_beats(known):
    kept = [known[place] for place in undominated(known)]
    for one in known:
        assert any(k.saved <= one.saved and k.peak <= one.peak and k.seconds <= one.seconds for k in kept)
    for one in kept:
        beaten = [k for k in kept if k is not one and all(a <= b for a, b in zip(k, one, strict=True))]
        assert all(k == one for k in beaten)


def test_the_knee_is_the_split_with_the_least_sum_of_memory_and_time():
    """Each unit can save half of what it holds for little time, and the rest for a lot of it."""
    choices = (Choice(10, 11, 1.0), Choice(5, 10, 1.1), Choice(2, 12, 1.3), Choice(1, 8, 3.0))
    moments = [Moment(0, 0, choices) for _ in range(5)]
    whole = peak_of(moments, 0, [0] * 5)
    sums = {}
    for peak, seconds in every(moments, 0):
        sums[peak] = min(sums.get(peak, inf), peak / whole + seconds / 5.0)
    assert sums[knee_peak(moments, 0)] == min(sums.values())
    assert knee_peak([], 7) == 7
