"""Python's garbage collector, paused while a step is captured and planned.

A capture makes some million objects that all live until it ends. The collector looks at them again and again
as their number grows, a tenth of the time of a capture, and finds next to nothing. What a capture does leave
in cycles is found by the first collection after it; who needs it gone before calls `gc.collect`, which works
as ever.
"""

from __future__ import annotations

import gc

from ..process_wide import Shared, UndoneBy

__all__ = ["uncollected"]


def _pause(undone_by: UndoneBy) -> None:
    if gc.isenabled():
        undone_by(gc.enable)
        gc.disable()


uncollected = Shared(_pause)
"""`with uncollected():` has no automatic collections in this process, until the last such block has ended."""
