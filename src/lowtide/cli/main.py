"""The command `lowtide`: the verb that was chosen, its answer printed, its errors told.

Arguments are parsed before a verb is loaded, so that help and bad arguments wait for nothing. Standard output
carries the result and nothing else, progress and errors go to standard error. The exit status is 0, 1 where
something did not hold or a budget cannot be met, 2 with one paragraph that says what was wrong with the
input, or 130 after an interrupt.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ..errors import BudgetTooSmall, LowtideError
from ..files.plain_text import plain
from .arguments import parse
from .verbs import Answer

__all__ = ["main"]

DID_NOT_HOLD = 1
BAD_INPUT = 2
INTERRUPTED = 130
PIPE_CLOSED = 141


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    try:
        with _terminated_as_interrupted():
            answer = _answer(arguments)
            _print(answer.text)
    except LowtideError as error:
        _tell(error)
        return DID_NOT_HOLD if isinstance(error, BudgetTooSmall) else BAD_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        return PIPE_CLOSED
    return 0 if answer.holds else DID_NOT_HOLD


def _answer(arguments: Sequence[str] | None) -> Answer:
    chosen = parse(arguments)
    verb = importlib.import_module(f".verbs.{chosen.verb}_verb", __package__)
    answer: Answer = verb.run(chosen)
    return answer


def _tell(error: LowtideError) -> None:
    """One paragraph, and below it, indented, hints and the lines of the user's own code."""
    print(f"lowtide: error: {plain(' '.join(str(error).split()))}", file=sys.stderr)
    for note in getattr(error, "__notes__", ()):
        print(plain(note if note.startswith("  ") else f"  {note}", keep="\n"), file=sys.stderr)


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM, as a scheduler sends it, ends the command the way Ctrl-C does."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # not in the main thread: signals do not come here
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _print(text: str) -> None:
    """Print the result; characters that the terminal does not know become question marks."""
    if not text:
        return
    encoding = sys.stdout.encoding or "utf-8"
    try:
        print(plain(text.rstrip("\n"), keep="\n\t").encode(encoding, "replace").decode(encoding), flush=True)
    except OSError as error:
        # What is left in the buffer would be tried again, and complained about, at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise
        raise LowtideError(f"cannot write the result: {error.strerror}") from None
