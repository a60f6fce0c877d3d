"""A progress bar on standard error: one line, drawn only where a person watches, and gone afterwards."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

__all__ = ["Bar", "bar"]

WIDTH = 30
PAUSE = 0.1
"""Seconds between two drawings: more often costs time and shows nothing."""


class Bar:
    """A line such as `[=====     ]  50%  auto`; called with the share done and what is under way."""

    def __init__(self, stream: TextIO, *, label: str = "") -> None:
        self.stream = stream
        self.label = label
        self.shown = stream.isatty() and os.environ.get("TERM") != "dumb"
        self.drawn: float | None = None

    def __call__(self, share: float, label: str | None = None) -> None:
        """Draw the bar; a new label is drawn at once, a new share only after a pause."""
        fresh = self.drawn is None or (label is not None and label != self.label)
        self.label = self.label if label is None else label
        now = time.monotonic()
        if self.shown and (fresh or now - (self.drawn or 0.0) >= PAUSE):
            self.drawn = now
            self._write("\r" + self._line(share) + "\x1b[K")

    def clear(self) -> None:
        """Take the line away."""
        if self.drawn is not None:
            self._write("\r\x1b[K")

    def _line(self, share: float) -> str:
        share = min(max(share, 0.0), 1.0)
        done = "=" * int(share * WIDTH)
        line = f"[{done:<{WIDTH}}] {share:4.0%}  {self.label}"
        return line[: shutil.get_terminal_size().columns - 1]

    def _write(self, text: str) -> None:
        self.stream.write(text)
        self.stream.flush()


@contextmanager
def bar(label: str = "", *, stream: TextIO | None = None) -> Iterator[Bar]:
    """A bar for the time of a `with` block."""
    made = Bar(sys.stderr if stream is None else stream, label=label)
    try:
        made(0.0)
        yield made
    finally:
        made.clear()
