"""The lines of the user's own that an error came through."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from traceback import FrameSummary
from typing import TypeVar

__all__ = ["is_internal", "own_lines", "place", "with_lines"]

MOST = 3
"""The most lines of the user's own that an error shows."""

PACKAGE = Path(__file__).parents[1]
"""The folder of Lowtide itself."""

E = TypeVar("E", bound=Exception)


@lru_cache(maxsize=1 << 10)
def is_internal(path: str) -> bool:
    """Whether a file is torch's or Lowtide's own machinery; the demonstration's model is a user's."""
    import torch  # here, so that the command line can wait for it

    if Path(path) == PACKAGE / "cli" / "demo.py":
        return False
    roots = (Path(torch.__file__).parent, PACKAGE)
    return any(Path(path).is_relative_to(root) for root in roots)


def own_lines(stack: Iterable[FrameSummary]) -> list[FrameSummary]:
    """The lines of a stack that are the user's own."""
    return [frame for frame in stack if not is_internal(frame.filename) and "<frozen" not in frame.filename]


def place(lines: list[FrameSummary]) -> str:
    """Where the last of the lines is, to end a sentence with."""
    return f" ({_named(lines[-1])})" if lines else ""


def with_lines(error: E, lines: list[FrameSummary]) -> E:
    """The error with the last of the lines below it."""
    for line in lines[-MOST:]:
        error.add_note(f"  {_named(line)}, in {line.name}\n    {line.line}")
    return error


def _named(line: FrameSummary) -> str:
    """A file and a line in it, from the current folder on."""
    path, here = Path(line.filename), Path.cwd()
    return f"{path.relative_to(here) if path.is_relative_to(here) else path}:{line.lineno}"
