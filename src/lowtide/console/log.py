"""What Lowtide says while it works: one line for each plan, and for what it does not do.

All of it goes through `logging.getLogger("lowtide")`, which propagates: handlers of the application, on that
logger or on the root, get every line. Where there is none, the line is printed on standard error, since a
plan that nobody hears of is a surprise. `logging.getLogger("lowtide").setLevel(logging.ERROR)` silences all.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any, TextIO

from ..files.plain_text import plain
from ..plans.planned_step import Plan
from ..process_wide import here
from ..units import format_bytes
from .progress import waiting

__all__ = ["log", "planning", "say_once", "say_plan", "silence", "under_way"]

log = logging.getLogger("lowtide")

NAME = "lowtide: on standard error"
"""Of the handler below, by which it is known again where this module is loaded twice."""


class Fallback(logging.StreamHandler[TextIO]):
    """Prints on standard error what no handler of the application gets.

    It asks anew for each line, as applications configure their logging when they like. `logging.lastResort`
    does the same, but for warnings only.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Print a line, unless somebody else gets it."""
        if not _heard(record.name):
            self.stream = sys.stderr  # as it is now: notebooks and tests put another one in its place
            super().emit(record)


class Plain(logging.Formatter):
    """Nothing that a line repeats from a file or a model is obeyed by the terminal."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        return plain(super().format(record), keep="\n\t")


def _heard(name: str) -> bool:
    """Whether a logger's records reach a handler other than ours."""
    logger: logging.Logger | None = logging.getLogger(name)
    while logger is not None:
        if any(handler.name != NAME for handler in logger.handlers):
            return True
        logger = logger.parent if logger.propagate else None
    return False


def _add_fallback() -> None:
    handler = Fallback()
    handler.name = NAME
    handler.setFormatter(Plain("lowtide: %(message)s"))
    log.addHandler(handler)


if not any(handler.name == NAME for handler in log.handlers):
    _add_fallback()
if log.level == logging.NOTSET:  # what a user has set stays: this is loaded at the first use only
    log.setLevel(logging.INFO)


@contextmanager
def planning() -> Iterator[None]:
    """A sign of life on a terminal while a step is captured and planned, gone when that is done.

    It says what is under way: whoever begins something else tells `under_way`.
    """
    if _is_silent() or not log.isEnabledFor(logging.INFO):
        yield
        return
    with waiting(_line("capturing this step"), stream=sys.stderr) as say, here(_here, say=say):
        yield


def under_way(what: str) -> None:
    """Say what is done now for a step, on the line of `planning` where this thread has one."""
    if _here.say is not None:
        _here.say(_line(what))


def _line(what: str) -> str:
    return f"lowtide: {what}"


def say_plan(plan: Plan) -> None:
    """One line about a new plan."""
    budget = plan.budget_in_words
    if plan.is_plain:
        log.info("nothing to do: the uncapped peak %s fits the budget %s", _peak_in_words(plan), budget)
        return
    log.info(
        "planned: peak %s of %s uncapped, budget %s, %+.1f%% time (%s)",
        _peak_in_words(plan),
        format_bytes(plan.uncapped.peak),
        budget,
        100 * plan.extra,
        plan.graph.prices,
    )


def _peak_in_words(plan: Plan) -> str:
    """What is allocated at the peak, and what is reserved for it where that is known."""
    reserved = "" if plan.reserved is None else f" ({format_bytes(plan.reserved)} reserved)"
    return format_bytes(plan.allocated) + reserved


@cache
def say_once(text: str) -> None:
    """A line that is not said again."""
    log.info(text)


class _Here(threading.local):
    silent = False
    say: Callable[[str], None] | None = None


_here = _Here()


def silence() -> AbstractContextManager[Any]:
    """Say nothing in this thread of plans that nobody asked for."""
    return here(_here, silent=True)


def _is_silent() -> bool:
    return _here.silent


def _is_said(record: logging.LogRecord) -> bool:
    return not _is_silent() or record.levelno >= logging.ERROR


log.addFilter(_is_said)
