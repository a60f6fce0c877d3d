"""How long planning may take: a search asks now and then, and ends with the best it has, or with an error.

The bound is that of the thread that plans, so that nothing has to hand it through all methods; a search with
threads of its own hands `until()` to them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from math import inf
from time import time

from ..errors import LowtideError, OutOfTime

__all__ = [
    "PLANNING_SECONDS",
    "check_seconds",
    "check_time",
    "out_of_time",
    "planning_for",
    "seconds_left",
    "unbounded",
    "until",
]

PLANNING_SECONDS = 600.0
"""By default. Chosen: steps of 50 000 ops are planned in a tenth of it (benchmarks/plan_times.py)."""

_until: ContextVar[tuple[float, float]] = ContextVar("until", default=(inf, inf))


@contextmanager
def planning_for(seconds: float) -> Iterator[None]:
    """For the time of a `with` block planning may take so long; a bound that is there already holds on."""
    before, _ = _until.get()
    token = _until.set((time() + seconds, seconds) if seconds < inf and before == inf else _until.get())
    try:
        yield
    finally:
        _until.reset(token)


@contextmanager
def unbounded() -> Iterator[None]:
    """For what has to be done with what was found in time."""
    token = _until.set((inf, inf))
    try:
        yield
    finally:
        _until.reset(token)


def until() -> float:
    """The moment at which planning ends, as `time.time` tells it."""
    return _until.get()[0]


def seconds_left() -> float:
    """How long planning may still take; raises `OutOfTime` where that is over."""
    check_time()
    return until() - time()


def check_time() -> None:
    """Raise `OutOfTime` where planning has taken too long."""
    if time() > until():
        raise out_of_time()


def out_of_time() -> OutOfTime:
    """The error, with the option that it names."""
    seconds = _until.get()[1]
    return OutOfTime(
        f"no plan was found in planning_seconds={seconds:g} s; take more (--planning-seconds on the command "
        'line), a larger budget, or a method that looks at less, as method="sqrt_segments"'
    )


def check_seconds(seconds: object) -> float:
    """A bound on planning as a user wrote it."""
    try:
        found = float(seconds) if isinstance(seconds, int | float) and not isinstance(seconds, bool) else 0.0
    except OverflowError:  # a whole number of hundreds of digits
        found = inf
    if not found > 0:
        raise LowtideError(f"planning_seconds={seconds!r} must be a number of seconds above 0")
    return found
