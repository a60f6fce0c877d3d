"""A turn on the device: of the processes that compile at the same time, one at a time measures.

First steps run on the device too, and try kernels out: several may at the same time, but not while one
measures (`beside_others`); while torch compiles they leave the device to the others. Who has waited long
enough to measure shuts a door behind those that are in, so that it need not wait for more of them.

The locks are those of files, so they are free again when their holder ends, however it ends. A process may
take its turn again while it has it.
"""

from __future__ import annotations

import fcntl
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch._dynamo.callback import callback_handler

from lowtide.prices import pricing

PATIENCE = 15.0
"""Seconds that one waits to measure before the door is shut: meanwhile others get ready to measure, too."""


class Turn:
    """A context; `waited` sums the seconds until it was this process's turn, `had` those of its turns.

    `shares` says whether this process uses the device beside others now.
    """

    def __init__(self, path: Path | None = None) -> None:
        path = path or Path(tempfile.gettempdir()) / "lowtide-headtohead.lock"
        self.file = os.open(path, os.O_RDWR | os.O_CREAT)
        self.door = os.open(f"{path}.door", os.O_RDWR | os.O_CREAT)
        self.depth, self.waited, self.had, self.began = 0, 0.0, 0.0, time.perf_counter()
        self.shares = False

    def __enter__(self) -> Turn:
        if self.depth == 0:
            self.take(fcntl.LOCK_EX)
            self.had -= time.perf_counter()
        self.depth += 1
        return self

    def __exit__(self, *_: object) -> None:
        self.depth -= 1
        if self.depth == 0:
            self.had += time.perf_counter()
            self.leave()

    def take(self, kind: int) -> None:
        start = time.perf_counter()
        if kind == fcntl.LOCK_SH or not self.comes_free():
            fcntl.flock(self.door, fcntl.LOCK_EX)
            fcntl.flock(self.file, kind)
            fcntl.flock(self.door, fcntl.LOCK_UN)
        self.shares = kind == fcntl.LOCK_SH
        self.waited += time.perf_counter() - start

    def comes_free(self) -> bool:
        """Wait for a moment at which nobody uses the device, and take it."""
        until = time.perf_counter() + PATIENCE
        while time.perf_counter() < until:
            try:
                fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                time.sleep(0.02)
        return False

    def leave(self, _: object = None) -> None:
        self.shares = False
        fcntl.flock(self.file, fcntl.LOCK_UN)

    def come_back(self, _: object = None) -> None:
        """Use the device beside others again, if it was left."""
        if not self.shares:
            self.take(fcntl.LOCK_SH)

    @contextmanager
    def away(self) -> Iterator[None]:
        """Leave the device that is used beside others for a while."""
        shared = self.shares
        if shared:
            self.leave()
        try:
            yield
        finally:
            if shared:
                self.come_back()

    @contextmanager
    def beside_others(self) -> Iterator[None]:
        """Use the device while nobody measures, and leave it while torch compiles."""
        if self.depth:
            yield
            return

        starts, ends = callback_handler.start_callbacks, callback_handler.end_callbacks
        calls = ((starts, self.leave), (ends, self.come_back))
        self.come_back()
        for known, call in calls:
            known.append(call)
        try:
            yield
        finally:
            for known, call in calls:
                if call in known:  # torch._dynamo.reset() forgets them
                    known.remove(call)
            self.leave()


def measure_prices_in(turn: Turn) -> None:
    """Let Lowtide measure its prices in a turn: they are times, and they go to a file that all share."""
    original = pricing.price

    def price(*args: Any, **kwargs: Any) -> Any:
        with turn:
            return original(*args, **kwargs)

    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "lowtide" and getattr(module, "price", None) is original:
            module.price = price  # type: ignore[attr-defined]


def compile_beside(turn: Turn) -> None:
    """Let Lowtide leave the device to others while it compiles a step again, which torch does not see."""
    from lowtide.run.inductor import step as compiled  # Inductor takes a second to import

    original = compiled.compiled_runner

    def compile_away(*stage: Any) -> Any:
        with turn.away():
            return original(*stage)

    compiled.compiled_runner = compile_away
