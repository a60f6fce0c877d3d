"""What Lowtide says while it works: one line on standard error for each plan, and for what it does not do.

`logging.getLogger("lowtide").setLevel(logging.ERROR)` silences it; a handler of your own sees the same.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

from ..plans.planned_step import Plan
from ..units import format_bytes
from .progress import waiting

__all__ = ["log", "planning", "say_once", "say_plan", "silence"]

log = logging.getLogger("lowtide")

if not log.handlers:
    _handler = logging.StreamHandler()
    _handler.setFormatter(logging.Formatter("lowtide: %(message)s"))
    log.addHandler(_handler)
    log.propagate = False
if log.level == logging.NOTSET:  # what a user has set stays: this is loaded at the first use only
    log.setLevel(logging.INFO)


def planning() -> AbstractContextManager[Any]:
    """A sign of life on a terminal while a step is captured and planned, gone when that is done."""
    if not log.isEnabledFor(logging.INFO):
        return nullcontext()
    return waiting("lowtide: planning this step", stream=sys.stderr)


def say_plan(plan: Plan) -> None:
    """One line about a new plan."""
    budget = "none" if plan.budget is None else format_bytes(plan.budget)
    if plan.method == "keep_all":
        log.info("nothing to do: the uncapped peak %s fits the budget %s", format_bytes(plan.peak), budget)
        return
    log.info(
        "planned: peak %s of %s uncapped, budget %s, %+.1f%% time (%s)",
        format_bytes(plan.peak),
        format_bytes(plan.uncapped.peak),
        budget,
        100 * plan.extra,
        plan.graph.prices,
    )


@cache
def say_once(text: str) -> None:
    """A line that is not said again."""
    log.info(text)


@contextmanager
def silence() -> Iterator[None]:
    """Say nothing of plans that nobody asked for."""
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)
