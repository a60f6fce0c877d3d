"""The knee against the convex hull that its definition speaks of, and cliffs against their definition."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from lowtide.solve.knee import NEAR, POINTS, STEEP, Point, cliff, knee

WHOLE = Point(1000, 100.0)
points = st.builds(Point, st.integers(1, 999), st.integers(101, 300).map(float))


def hull(plans):
    """The corners of the lower convex hull from the largest peak on: next the one with the least slope."""
    corner, left = WHOLE, [plan for plan in plans if plan.peak < WHOLE.peak]
    while left:
        yield corner
        best = min(left, key=lambda plan: (slope(corner, plan), plan.peak))
        corner, left = best, [plan for plan in left if plan.peak < best.peak]
    yield corner


def slope(large, small):
    """Percents of time for a percent of memory."""
    share = (small.seconds - large.seconds) / WHOLE.seconds
    return share / ((large.peak - small.peak) / WHOLE.peak)


@given(st.lists(points, max_size=12))
def test_the_knee_is_where_a_percent_of_memory_begins_to_cost_more_than_a_percent_of_time(plans):
    corners = list(hull(plans))
    found = knee([WHOLE, *plans], WHOLE)
    slopes = [slope(*pair) for pair in pairwise(corners)]
    assert slopes == sorted(slopes)
    before = [small for (_, small), steep in zip(pairwise(corners), slopes, strict=True) if steep < 1 - 1e-9]
    until = [small for (_, small), steep in zip(pairwise(corners), slopes, strict=True) if steep < 1 + 1e-9]
    assert found in {before[-1] if before else WHOLE, until[-1] if until else WHOLE, *until[len(before) :]}


@given(st.lists(points, min_size=1, max_size=12), points)
def test_a_plan_that_is_beaten_by_two_others_together_moves_no_knee(plans, more):
    corners = list(hull(plans))
    around = [(large, small) for large, small in pairwise(corners) if small.peak < more.peak < large.peak]
    if around and slope(around[0][0], more) > slope(*around[0]):
        assert knee([WHOLE, *plans, more], WHOLE) == knee([WHOLE, *plans], WHOLE)


@given(st.lists(points, max_size=12), points)
def test_a_cliff_is_near_high_and_steep(plans, here):
    near = [plan for plan in plans if 0 < plan.peak - here.peak <= NEAR * WHOLE.peak]
    steep = [
        plan
        for plan in near
        if here.seconds - plan.seconds >= POINTS * WHOLE.seconds and slope(plan, here) >= STEEP
    ]
    found = cliff(plans, here, WHOLE)
    assert (found is None) == (not steep)
    if found is not None:
        assert slope(found, here) == max(slope(plan, here) for plan in steep)


def test_a_step_of_nothing_has_a_knee():
    assert knee([Point(0, 0.0)], Point(0, 0.0)) == Point(0, 0.0)
