"""What is there when a step is called and does not fit beside the plan that was made without it.

Calls whose backward is still to come, optimizer state, gradients of earlier calls: where the plan has no room
for them the step is planned anew with them, or, where its budget is a share of its own peak, that is said.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

from ..options import limit, relative_to
from ..pipeline.in_flight import held_beside, some_plan
from ..units import format_bytes
from .entries import Entry

__all__ = ["bytes_of_calls", "gradients_are_more", "state_is_more"]

Say = Callable[[str], None]


def bytes_of_calls(entry: Entry, say: Say) -> int:
    """The bytes of calls in flight, where they do not fit beside the plan."""
    caller, options = entry.caller, entry.options
    beside = held_beside(caller)
    if not beside or entry.fits(beside):
        return 0
    if limit(options, entry.plan or some_plan()) is None:
        say(f"{relative_to(options)}: what calls hold whose backward is still to come is not in it")
        return 0
    if caller.beside != beside:
        gc.collect()  # a call that only a cycle of objects holds, such as a traceback's, may be gone
        caller.beside = held_beside(caller)
    return caller.beside


def state_is_more(entry: Entry, say: Say) -> bool:
    """Whether optimizer state that is there now does not fit beside the plan that was made without it."""
    if entry.plan is None or entry.fits(0):
        return False
    if limit(entry.options, entry.plan) is None:
        say(
            f"{relative_to(entry.options)}: the {format_bytes(entry.state)} of optimizer state that were "
            "made since then are not in it. lowtide.cap(..., optimizer=optimizer) counts them"
        )
        return False
    say(
        f"{format_bytes(entry.state)} of optimizer state were made after this step was planned, and do not "
        "fit beside it: it is planned again. lowtide.cap(..., optimizer=optimizer) plans for them from the "
        "first step on"
    )
    return True


def gradients_are_more(entry: Entry, say: Say, *, stepped: Callable[[], bool]) -> bool:
    """Whether gradients that are there now do not fit beside the plan that was made without them."""
    present = entry.gradients()
    if present == 0 or entry.plan is None or entry.fits(present):
        return False
    if stepped():
        say(
            f"{format_bytes(present)} of gradients of the step before are still there while this one is "
            "called, and are planned for; optimizer.zero_grad() before the forward, not after it, leaves "
            "their room to the step"
        )
    return True
