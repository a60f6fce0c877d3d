"""Training calls in flight: those whose backward is still to come.

Each holds what its plan saves until its backward has run. A second call before that has less room, and the
first one's backward will find the second one's gradients: the second is planned beside the first, or refused.
A call is in flight while autograd's node of its backward is alive and has not been called.

The state of autocast that a backward comes in is compared here with the one that it was traced for.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

from ..console.log import log
from ..errors import UnsupportedBackward
from ..planner.other_shapes import OtherShapes
from ..plans.planned_step import Plan
from ..torch_state.autocast_state import State, present_state
from ..units import format_bytes
from .returned import Holds

__all__ = [
    "BAND",
    "Call",
    "Caller",
    "fits_beside",
    "held_beside",
    "keep_account",
    "refuse_if_over",
    "some_plan",
    "too_many",
    "waits_for_backward",
]

BAND = "calls in flight"

_pending: weakref.WeakSet[Call] = weakref.WeakSet()


@dataclass(eq=False)
class Caller:
    """A capped model or function: its name, and the autocast that its last backward came in.

    `beside` are the bytes that calls in flight held when it was last planned beside some. `number` tells
    callers of one name apart, and `attempts` counts how often it was planned: the same on ranks that do the
    same. `holds` is what is known of who holds the results of its calls. `updated` are the parameters that
    its last backward updated, `steps` how often each optimizer had stepped by then (`stepping.py`). `search`
    remembers what was found for its other shapes.
    """

    name: str = "this step"
    autocast: State = ()
    beside: int = 0
    said: set[State] = field(default_factory=set)
    holds: Holds = field(default_factory=Holds)
    number: int = field(init=False, default=0)
    attempts: int = 0
    updated: list[weakref.ref[torch.Tensor]] = field(default_factory=list)
    steps: dict[int, int] = field(default_factory=dict)
    search: OtherShapes = field(default_factory=OtherShapes, repr=False)

    def __post_init__(self) -> None:
        _callers[self.name] += 1
        self.number = _callers[self.name]

    def next_attempt(self) -> str:
        """A name for the next time that it is planned."""
        self.attempts += 1
        return f"{self.name}.{self.number}.{self.attempts}"


_callers: Counter[str] = Counter()


@dataclass(eq=False)
class Call:
    """One training call: who made it, by which plan, and the autocast that its backward was traced for.

    `limit` is what it may take together with others; None where its budget is a share of its own peak.
    """

    caller: Caller
    plan: Plan
    autocast: State
    limit: int | None

    def begin_backward(self, *_: Any) -> None:
        """Called by autograd before the backward of this call runs."""
        _pending.discard(self)
        state = self.caller.autocast = present_state()
        if state != self.autocast and state not in self.caller.said:
            self.caller.said.add(state)
            log.warning(_other_autocast(state))

    @property
    def held(self) -> int:
        """The bytes that it holds until its backward: what the plan saves, and the batch."""
        return held(self.plan)

    @property
    def own_peak(self) -> int:
        """The peak of the plan without what it sets aside for other calls."""
        return self.plan.allocated - self.plan.graph.fixed.get(BAND, 0)


def held(plan: Plan) -> int:
    """What a call by that plan holds until its backward, besides parameters and buffers."""
    return plan.saved + plan.input_bytes


def _other_autocast(state: State) -> str:
    now, traced = ("inside", "outside") if state else ("outside", "inside")
    return (
        f"backward was called {now} autocast, and this step was captured for one {traced}: its gradients are "
        f"those of a backward {traced}, which differ in rounding. The next call is captured for one {now}"
    )


def keep_account(node: Any, call: Call) -> None:
    """Count a call as in flight until autograd calls its node, or lets go of it."""
    node.register_prehook(call.begin_backward)
    _pending.add(call)


def held_beside(caller: Caller) -> int:
    """The bytes that calls in flight hold, and the gradients that earlier ones of this caller will leave."""
    calls = list(_pending)
    own = [call.plan.gradient_bytes for call in calls if call.caller is caller]
    return sum(call.held for call in calls) + max(own, default=0)


def waits_for_backward(caller: Caller) -> bool:
    """Whether the backward of some call of this caller is still to come."""
    return any(call.caller is caller for call in list(_pending))


def some_plan() -> Plan | None:
    """The plan of one of the calls in flight."""
    return next((call.plan for call in _pending), None)


def refuse_if_over(caller: Caller, plan: Plan | None) -> None:
    """Raise before a call runs beside which an earlier one would not keep its budget."""
    if plan is None or fits_beside(caller, plan):
        return
    gc.collect()  # a call that only a cycle of objects holds may be gone
    if not fits_beside(caller, plan):
        raise too_many(caller, plan.budget)


def fits_beside(caller: Caller, plan: Plan) -> bool:
    """Whether each call in flight of this caller keeps its budget beside the others and one by this plan."""
    calls = list(_pending)
    total = sum(call.held for call in calls) + held(plan)
    return all(
        call.own_peak + total - call.held + plan.gradient_bytes <= call.limit
        for call in calls
        if call.caller is caller and call.limit is not None
    )


def too_many(caller: Caller, budget: int | None) -> UnsupportedBackward:
    """The error for a call that does not fit beside those in flight."""
    calls = list(_pending)
    waiting = format_bytes(sum(call.held for call in calls))
    earlier = "an earlier training call is" if len(calls) == 1 else f"{len(calls)} earlier training calls are"
    asked = "the budget" if budget is None else f"the budget of {format_bytes(budget)}"
    return UnsupportedBackward(
        f"{caller.name} is called while the backward of {earlier} still to come, for which {waiting} are "
        f"held: together they do not fit {asked}. Call backward after each forward, or let go of results "
        "that need none; or put the calls into one function that returns the sum of their losses, and cap "
        "that: it is planned as one step"
    )
