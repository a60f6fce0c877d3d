"""The knee of a frontier, and cliffs just above a budget: numbers only.

Problem: the last percents of memory may cost more time than all others. Which plan is it worth stopping at,
and when is a budget a little too small?

The *knee* is where the next percent of the uncapped peak begins to cost more than a percent of the time of
keeping everything. The slope from one plan to its neighbour is noise: one lucky rung makes a flat and a steep
piece of an even way. So it is that of the lower convex hull of all plans, in these shares. Along the hull
slopes only grow; the corner where they pass 1 is the plan with the least sum of both shares, and no hull is
built. O(plans).

A *cliff* is right above a budget where a little more memory saves much time: `POINTS` of the time of keeping
everything at least, and `STEEP` percents of it for each percent of the uncapped peak, within `NEAR` of that.
All three are chosen.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

__all__ = ["Point", "cliff", "knee"]

NEAR, POINTS, STEEP = 0.05, 0.03, 3.0


class Point(NamedTuple):
    """What a plan takes."""

    peak: int
    seconds: float


def knee(points: Iterable[Point], whole: Point) -> Point:
    """The knee of some plans, where keeping everything takes the whole; the faster one of equal ones.

    >>> plans = [Point(100, 10.0), Point(60, 11.0), Point(40, 13.0), Point(30, 13.5), Point(28, 20.0)]
    >>> knee(plans, plans[0])
    Point(peak=30, seconds=13.5)
    """
    peak, seconds = max(whole.peak, 1), whole.seconds or 1.0
    return min(points, key=lambda point: (point.peak / peak + point.seconds / seconds, point.seconds))


def cliff(points: Iterable[Point], here: Point, whole: Point) -> Point | None:
    """The plan just above a smaller one that saves the most time per byte, if that is a cliff.

    >>> cliff([Point(43, 11.0), Point(60, 10.0)], Point(40, 14.0), Point(100, 10.0))
    Point(peak=43, seconds=11.0)
    >>> cliff([Point(43, 13.5), Point(60, 10.0)], Point(40, 14.0), Point(100, 10.0)) is None
    True
    """

    def saved(point: Point) -> float:
        return (here.seconds - point.seconds) / (whole.seconds or 1.0)

    def more(point: Point) -> float:
        return (point.peak - here.peak) / max(whole.peak, 1)

    near = [point for point in points if 0 < more(point) <= NEAR and saved(point) >= POINTS]
    best = max(near, key=lambda point: saved(point) / more(point), default=None)
    return best if best is not None and saved(best) >= STEEP * more(best) else None
