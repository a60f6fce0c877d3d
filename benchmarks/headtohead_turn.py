"""A turn on the device: of the processes that compile at the same time, one at a time measures.

The lock is that of a file, so it is free again when its holder ends, however it ends. While a process has its
turn, its threads run on a few cores that the others leave alone: launching kernels must not wait for
somebody's compiler. A process may take its turn again while it has it.
"""

from __future__ import annotations

import fcntl
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from lowtide import cost

QUIET = 3
"""Cores that are kept for the process whose turn it is, on a machine of at least eight."""


class Turn:
    """A context; `waited` sums the seconds until it was this process's turn."""

    def __init__(self, path: Path | None = None, *, quiet: int = QUIET) -> None:
        path = path or Path(tempfile.gettempdir()) / "lowtide-headtohead.lock"
        self.file = os.open(path, os.O_RDWR | os.O_CREAT)
        self.depth, self.waited = 0, 0.0
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        self.quiet, self.others = (cores[:quiet], cores[quiet:]) if len(cores) >= 8 else ([], [])
        run_on(self.others)

    def __enter__(self) -> Turn:
        if self.depth == 0:
            start = time.perf_counter()
            fcntl.flock(self.file, fcntl.LOCK_EX)
            self.waited += time.perf_counter() - start
            run_on(self.quiet)
        self.depth += 1
        return self

    def __exit__(self, *_: object) -> None:
        self.depth -= 1
        if self.depth == 0:
            run_on(self.others)
            fcntl.flock(self.file, fcntl.LOCK_UN)


def run_on(cores: list[int]) -> None:
    """Move every thread of this process to the cores, if there are any."""
    for thread in os.listdir("/proc/self/task") if cores else []:
        try:
            os.sched_setaffinity(int(thread), cores)
        except ProcessLookupError:  # it has ended meanwhile
            continue


def measure_prices_in(turn: Turn) -> None:
    """Let Lowtide measure its prices in a turn: they are times, and they go to a file that all share."""
    original = cost.price

    def price(*args: Any, **kwargs: Any) -> Any:
        with turn:
            return original(*args, **kwargs)

    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "lowtide" and getattr(module, "price", None) is original:
            module.price = price  # type: ignore[attr-defined]
