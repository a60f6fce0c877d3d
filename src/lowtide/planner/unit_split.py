"""One budget over the units of a step: which plan each of them follows.

Problem: the units of a step run one after another, forward, and in the opposite order backward. While one
runs, all that ran before it hold what they saved. So with S(i) the bytes saved by the units before unit i,
and for each unit a few plans with other (saved, peak, seconds), choose one plan per unit for the least
seconds, such that at each unit `beside(i) + S(i) + peak <= budget`, and outside of units
`outside(i) + S(i) <= budget`.

Method: a knapsack over prefixes. Labels (saved so far, seconds) go from unit to unit; those that another one
beats in both are dropped. Less saved is never worse later on, so what is dropped was not needed: exact, up to
the rounding of labels where there are very many. Whether a budget is feasible at all a greedy pass tells, and
the smallest feasible one is found by bisection. O(units * plans * labels); no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..solve.knee import Point, knee

__all__ = ["Choice", "Moment", "knee_peak", "peak_of", "smallest", "split", "undominated"]

_MOST_LABELS = 2048
"""Above this number labels are thinned to evenly spread ones; chosen."""


_KNEE_LOOKS = 50
"""Budgets that are looked at for the knee, evenly spread. Chosen."""


class Choice(NamedTuple):
    """What a unit could do: the bytes that it holds until its backward, its peak, its seconds."""

    saved: int
    peak: int
    seconds: float


@dataclass(frozen=True)
class Moment:
    """A unit's turn: what is there beside it and outside of all units just before, and its choices."""

    beside: int
    outside: int
    choices: tuple[Choice, ...]


class _Label(NamedTuple):
    saved: int
    seconds: float
    choice: int = -1
    before: _Label | None = None


def undominated(choices: Iterable[Choice]) -> list[int]:
    """The places of the choices that no other one beats in bytes saved, peak and seconds together."""
    known = list(choices)
    kept: list[int] = []
    for place in sorted(range(len(known)), key=lambda place: (known[place].seconds, known[place])):
        one = known[place]
        if not any(known[o].saved <= one.saved and known[o].peak <= one.peak for o in kept):
            kept.append(place)
    return kept


def split(moments: Sequence[Moment], end: int, budget: int) -> list[int] | None:
    """For each unit the place of its choice, for the least seconds; None where nothing fits.

    `end` is what is there outside of all units when all wait for their backward.
    """
    labels = [_Label(0, 0.0)]
    for moment in moments:
        found = []
        for label in labels:
            if moment.outside + label.saved > budget:
                continue
            room = budget - moment.beside - label.saved
            for place, choice in enumerate(moment.choices):
                if choice.peak <= room:
                    found.append(
                        _Label(label.saved + choice.saved, label.seconds + choice.seconds, place, label)
                    )
        labels = _thinned(_undominated(found))
    labels = [label for label in labels if end + label.saved <= budget]
    if not labels:
        return None
    best = min(labels, key=lambda label: label.seconds)
    chosen = []
    while best.before is not None:
        chosen.append(best.choice)
        best = best.before
    return chosen[::-1]


def _undominated(labels: list[_Label]) -> list[_Label]:
    kept: list[_Label] = []
    for label in sorted(labels, key=lambda label: (label.saved, label.seconds)):
        if not kept or label.seconds < kept[-1].seconds:
            kept.append(label)
    return kept


def _thinned(labels: list[_Label]) -> list[_Label]:
    """Evenly spread ones; the one with the fewest bytes stays, so that what was feasible still is."""
    if len(labels) <= _MOST_LABELS:
        return labels
    step = (len(labels) - 1) / (_MOST_LABELS - 1)
    return [labels[round(place * step)] for place in range(_MOST_LABELS)]


def peak_of(moments: Sequence[Moment], end: int, chosen: Sequence[int]) -> int:
    """The peak of a step whose units follow these choices."""
    saved = peak = 0
    for moment, place in zip(moments, chosen, strict=True):
        choice = moment.choices[place]
        peak = max(peak, moment.outside + saved, moment.beside + saved + choice.peak)
        saved += choice.saved
    return max(peak, end + saved)


def knee_peak(moments: Sequence[Moment], end: int) -> int:
    """The peak below which the next percent of memory costs more than a percent of time."""
    kept = [0] * len(moments)
    low, high = peak_of(moments, end, smallest(moments, end)), peak_of(moments, end, kept)
    sizes = (low + (high - low) * step // _KNEE_LOOKS for step in range(_KNEE_LOOKS))
    found = [chosen for size in sizes if (chosen := split(moments, end, size)) is not None]
    points = [Point(peak_of(moments, end, chosen), _seconds(moments, chosen)) for chosen in (kept, *found)]
    return knee(points, points[0]).peak


def _seconds(moments: Sequence[Moment], chosen: Sequence[int]) -> float:
    return sum(moment.choices[place].seconds for moment, place in zip(moments, chosen, strict=True))


def smallest(moments: Sequence[Moment], end: int) -> list[int]:
    """The choices with the smallest peak of all."""
    low, high = 0, peak_of(moments, end, [0] * len(moments))
    best = _leanest(moments, end, high)
    assert best is not None
    while low < high:
        middle = (low + high) // 2
        found = _leanest(moments, end, middle)
        if found is None:
            low = middle + 1
        else:
            best, high = found, min(middle, peak_of(moments, end, found))
    return best


def _leanest(moments: Sequence[Moment], end: int, budget: int) -> list[int] | None:
    """The choices that save least under a budget: where these do not fit, none do."""
    saved, chosen = 0, []
    for moment in moments:
        room = budget - moment.beside - saved
        fitting = [place for place, choice in enumerate(moment.choices) if choice.peak <= room]
        if not fitting or moment.outside + saved > budget:
            return None
        chosen.append(min(fitting, key=lambda place: moment.choices[place]))
        saved += moment.choices[chosen[-1]].saved
    return chosen if end + saved <= budget else None
