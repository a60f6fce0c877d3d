"""The other processes of a run: stopped while one of them takes times, and set going again.

A step of many small kernels takes as long as its launches, and these take longer while the cores compile for
somebody else. Whoever starts the processes of a run names itself in their environment (`naming`); they and
the compilers that they start are found by their parents. Only where there is a /proc; elsewhere none is.
"""

from __future__ import annotations

import os
import signal
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_RUN = "LOWTIDE_BENCHMARK_RUN"


def naming() -> dict[str, str]:
    """What to add to the environment of the processes that this one starts."""
    return {_RUN: str(os.getpid())}


def others() -> list[int]:
    """The processes of the run that this one belongs to, but for its own and the first."""
    run = os.environ.get(_RUN)
    if run is None:
        return []
    mine = {int(run), os.getpid(), *below(os.getpid())}
    return [number for number in below(int(run)) if number not in mine]


def below(number: int) -> list[int]:
    """The processes that one has started, and those that they have."""
    children, found = _children(), [number]
    for parent in found:
        found += children[parent]
    return found[1:]


@contextmanager
def standing_still() -> Iterator[None]:
    """Let the others of the run stand still for a while."""
    stopped = others()
    _send(signal.SIGSTOP, stopped)
    try:
        yield
    finally:
        _send(signal.SIGCONT, stopped)


def go_on() -> None:
    """Set all going that this process has started: one that ended may have stopped the others."""
    _send(signal.SIGCONT, below(os.getpid()))


def _send(what: signal.Signals, numbers: Iterable[int]) -> None:
    for number in numbers:
        with suppress(ProcessLookupError):
            os.kill(number, what)


def _children() -> dict[int, list[int]]:
    found: dict[int, list[int]] = defaultdict(list)
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            parent = path.read_text().rpartition(")")[2].split()[1]
            found[int(parent)].append(int(path.parent.name))
    return found
