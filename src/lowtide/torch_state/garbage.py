"""Python's garbage collector, paused while a step is captured and planned.

A capture makes some million objects that all live until it ends. The collector looks at them again and again
as their number grows, a tenth of the time of a capture, and finds next to nothing. What a capture does leave
in cycles is found by the first collection after it; who needs it gone before calls `gc.collect`, which works
as ever.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["uncollected"]

_lock = threading.Lock()
_inside = 0
_was_on = False


@contextmanager
def uncollected() -> Iterator[None]:
    """No automatic collections in this process, until the last of several such blocks has ended."""
    _pause()
    try:
        yield
    finally:
        _resume()


def _pause() -> None:
    global _inside, _was_on
    with _lock:
        if not _inside:
            _was_on = gc.isenabled()
            gc.disable()
        _inside += 1


def _resume() -> None:
    global _inside
    with _lock:
        _inside -= 1
        if not _inside and _was_on:
            gc.enable()
