"""Where the seconds before a first step go: a line for each stage, at debug level.

    logging.getLogger("lowtide").setLevel(logging.DEBUG)

Stages lie inside of each other, as AOTAutograd asks for plans in the middle of its work, and torch.compile's
front end for AOTAutograd. Each is told with its own seconds alone, so that the lines of a round add up.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from .log import log

__all__ = ["timed"]

_under_way = threading.local()


@contextmanager
def timed(name: str) -> Iterator[None]:
    """Tell how long a `with` block, or a function that this stands above, took without the stages inside."""
    if not log.isEnabledFor(logging.DEBUG):
        yield
        return
    around: float = getattr(_under_way, "inside", 0.0)
    _under_way.inside = 0.0
    start = time.perf_counter()
    try:
        yield
    finally:
        took = time.perf_counter() - start
        log.debug("%s: %.2f s", name, took - _under_way.inside)
        _under_way.inside = around + took
