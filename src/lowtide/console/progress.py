"""Progress on standard error: one line, drawn only where a person watches, and gone afterwards.

`bar` is for work whose share done is known, `waiting` for the rest. Where the package `rich` is installed it
draws them; it is not needed.
"""

from __future__ import annotations

import importlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TextIO

from ..files.plain_text import plain

__all__ = ["Bar", "bar", "waiting"]

WIDTH = 30
PAUSE = 0.1
"""Seconds between two drawings: more often costs time and shows nothing."""
PATIENCE = 1.0
"""Seconds that work takes without a line about it."""

_one_line = threading.Lock()


class Drawn(Protocol):
    """A line of progress: called with the share done and what is under way."""

    def __call__(self, share: float, label: str | None = None) -> None: ...


class Bar:
    """A line such as `[=====     ]  50%  auto`; called with the share done and what is under way."""

    def __init__(self, stream: TextIO, *, label: str = "") -> None:
        self.stream = stream
        self.label = label
        self.shown = watched(stream)
        self.drawn: float | None = None

    def __call__(self, share: float, label: str | None = None) -> None:
        """Draw the bar; a new label is drawn at once, a new share only after a pause."""
        fresh = self.drawn is None or (label is not None and label != self.label)
        self.label = self.label if label is None else label
        now = time.monotonic()
        if self.shown and (fresh or now - (self.drawn or 0.0) >= PAUSE):
            self.drawn = now
            share = min(max(share, 0.0), 1.0)
            self.write(f"[{'=' * int(share * WIDTH):<{WIDTH}}] {share:4.0%}  {plain(self.label)}")

    def write(self, line: str) -> None:
        """Draw a line in place of the last one."""
        self.stream.write("\r" + line[: shutil.get_terminal_size().columns - 1] + "\x1b[K")
        self.stream.flush()

    def clear(self) -> None:
        """Take the line away."""
        if self.drawn is not None:
            self.write("")


class Clock(Bar):
    """A line such as `capturing the step ... 3 s`, drawn from a thread of its own after some patience."""

    def __init__(self, stream: TextIO, *, label: str = "") -> None:
        super().__init__(stream, label=label)
        self.start = time.monotonic()
        self.done = threading.Event()
        self.thread = threading.Thread(target=self.tick, daemon=True)
        if self.shown:
            self.thread.start()

    def tick(self) -> None:
        """Draw the seconds until the work is done."""
        pause = PATIENCE
        while not self.done.wait(pause):
            pause = 2 * PAUSE
            self.drawn = time.monotonic()
            self.write(f"{self.label} ... {self.drawn - self.start:.0f} s")

    def clear(self) -> None:
        """Stop the thread and take the line away."""
        self.done.set()
        if self.thread.is_alive():
            self.thread.join()
        super().clear()


class RichBar:
    """The same lines, drawn by `rich`; without a share done the bar is left out."""

    def __init__(self, rich: Any, *, label: str, known: bool) -> None:
        text = rich.TextColumn("{task.description}", markup=False)  # file names may have brackets
        shares = [rich.BarColumn(), rich.TaskProgressColumn()] if known else []
        columns = [rich.SpinnerColumn(), *shares, text, rich.TimeElapsedColumn()]
        self.drawing = rich.Progress(*columns, console=rich.Console(stderr=True), transient=True)
        self.task = self.drawing.add_task(label, total=1.0 if known else None)
        self.drawing.start()

    def __call__(self, share: float, label: str | None = None) -> None:
        """Draw the share done, and what is under way if it is new."""
        self.drawing.update(self.task, completed=share, description=label)

    def clear(self) -> None:
        """Take the line away."""
        self.drawing.stop()


def watched(stream: TextIO) -> bool:
    """Whether a person sees a stream, on something that can draw a line anew."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


@contextmanager
def bar(label: str = "", *, stream: TextIO | None = None) -> Iterator[Drawn]:
    """A bar for the time of a `with` block."""
    made = _by_rich(label, stream, known=True) or Bar(_stream(stream), label=label)
    try:
        made(0.0)
        yield made
    finally:
        made.clear()


@contextmanager
def waiting(label: str, *, stream: TextIO | None = None) -> Iterator[Callable[[str], None]]:
    """A line for the time of a `with` block, once that takes longer; called with what is under way now.

    Inside another one nothing is drawn: a terminal has room for one such line.
    """
    if not _one_line.acquire(blocking=False):
        yield lambda label: None
        return
    try:
        with _line(label, stream) as say:
            yield say
    finally:
        _one_line.release()


@contextmanager
def _line(label: str, stream: TextIO | None) -> Iterator[Callable[[str], None]]:
    made = _by_rich(label, stream, known=False) or Clock(_stream(stream), label=label)

    def say(label: str) -> None:
        if isinstance(made, RichBar):
            made(0.0, label)
        else:
            made.label = label

    try:
        yield say
    finally:
        made.clear()


def _stream(stream: TextIO | None) -> TextIO:
    return sys.stderr if stream is None else stream


def _by_rich(label: str, stream: TextIO | None, *, known: bool) -> RichBar | None:
    if stream is not None or not watched(sys.stderr):
        return None
    try:
        rich = importlib.import_module("rich.progress")
    except ImportError:
        return None
    return RichBar(rich, label=label, known=known)
