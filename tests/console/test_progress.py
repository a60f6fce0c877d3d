"""Progress on a terminal: one line, drawn where a person watches, and taken away."""

from __future__ import annotations

import io
import re
import sys
import time
from typing import Any

import pytest

from lowtide.console import progress as drawing
from lowtide.console.progress import Bar, bar, waiting


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_bar_is_drawn_on_a_terminal_and_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    screen = Screen()
    with bar("frontier", stream=screen) as progress:
        progress(0.5, "auto")
        progress(7.0, "keep_all")
    assert f"\r[{'=' * 15}{' ' * 15}]  50%  auto\x1b[K" in screen.getvalue()
    assert f"\r[{'=' * 30}] 100%  keep_all\x1b[K" in screen.getvalue()
    assert screen.getvalue().endswith("\r\x1b[K")


def test_the_bar_is_taken_away_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    screen = Screen()
    with pytest.raises(ZeroDivisionError), bar("frontier", stream=screen):
        raise ZeroDivisionError
    assert screen.getvalue().endswith("\r\x1b[K")


def test_the_bar_is_drawn_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    now = [100.0]
    monkeypatch.setattr("lowtide.console.progress.time.monotonic", lambda: now[0])
    progress = Bar(screen := Screen())
    for tick in range(1000):
        now[0] = 100.0 + tick / 1000
        progress(tick / 1000)
    assert screen.getvalue().count("\r") == 10


def test_the_bar_fits_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    Bar(screen := Screen())(0.5, "a method with a long name")
    assert len(screen.getvalue()) == len("\r\x1b[K") + 39


@pytest.mark.parametrize(("screen", "term"), [(io.StringIO(), "xterm"), (Screen(), "dumb")])
def test_no_bar_where_nobody_watches(screen: io.StringIO, term: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", term)
    with bar("frontier", stream=screen) as progress:
        progress(0.5)
    assert screen.getvalue() == ""


def test_waiting_is_told_after_a_second_and_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(drawing, "PATIENCE", 0.01)
    monkeypatch.setattr(drawing, "PAUSE", 0.005)
    screen = Screen()
    with waiting("capturing", stream=screen) as say:
        wait_for(r"\rcapturing \.\.\. \d+ s\x1b\[K", screen)
        say("planning")
        wait_for(r"\rplanning \.\.\. \d+ s\x1b\[K", screen)
    assert screen.getvalue().endswith("\r\x1b[K")


def wait_for(line: str, screen: io.StringIO) -> None:
    """Until a thread has drawn a line: on a busy machine it may wait long for its turn."""
    until = time.monotonic() + 600
    while not re.search(line, screen.getvalue()):
        assert time.monotonic() < until
        time.sleep(0.005)


def test_short_work_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(drawing, "PATIENCE", 3600.0)
    with waiting("capturing", stream=(screen := Screen())) as say:
        say("planning")
    assert screen.getvalue() == ""


@pytest.mark.parametrize("draw", [bar, waiting])
def test_rich_draws_where_it_is_installed(draw: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", screen := Screen())
    with draw("the [first] label") as progress:
        progress(*((0.5, "model.py:step") if draw is bar else ("model.py:step",)))
        wait_for("model.py:step", screen)
    assert "model.py:step" in screen.getvalue()
    assert screen.getvalue().endswith("\x1b[2K")


def test_without_rich_the_lines_are_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    monkeypatch.setattr(sys, "stderr", screen := Screen())
    with bar("frontier"):
        pass
    assert screen.getvalue() == f"\r[{' ' * 30}]   0%  frontier\x1b[K\r\x1b[K"
