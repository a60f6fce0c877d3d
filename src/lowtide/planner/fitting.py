"""The search for a plan that fits its budget as the device's allocator counts, down a method's own plans.

A method plans for bytes of values alone. What the allocator adds to a plan (the rest of its blocks, and the
holes between them, by `arenas`) is known once there is a schedule, so plans for fewer and fewer bytes are
tried until one fits; where the one before did not, a few between the two are tried as well. Where nothing is
known of an allocator, the first plan fits or none does. O(log bytes) plans, each with a few replays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, takewhile
from math import inf

from ..devices.memory import DeviceMemory
from ..plans.planned_step import Plan
from .arenas import least_reserving, within

__all__ = ["Fitting"]

_BETWEEN = 4
"""Plans that are tried between one that fits and one that does not: each halves the gap. Chosen."""
_APART = 1.015
"""How far apart the peaks are of plans that are tried for the least reserved bytes. Chosen: on the steps of
the head-to-head finer ones find nothing lower."""


@dataclass(frozen=True)
class Fitting:
    """Plans of a graph on a device; `made` plans for bytes of values, and says the peak of those alone.

    It searches anew where that is asked for, and else takes from the plans that a search has left at hand.
    `whole` is the peak up to which a budget may have a plan of its own.
    """

    device: DeviceMemory
    made: Callable[[int, bool], tuple[Plan, int]]
    whole: int

    def below(self, limit: int) -> Plan:
        """The fastest plan found within the limit, else the one with the smallest peak."""
        # The overhead depends on what else is on the device: a little stays free, where a plan leaves it.
        wanted = limit if self.device.blocks is None else limit - (limit >> 10)
        room, step = wanted, limit >> 10
        failed: int | None = None
        tight: Plan | None = None
        while True:
            plan, bare = self.made(room, failed is None)
            plan, over = self.fitted(plan, limit, wanted)
            if over <= 0:
                return self.between(plan, room, failed, limit)
            if plan.peak <= limit:
                tight = tight or plan
            if bare > room:
                least = tight or self.least(plan)
                if least.peak <= limit or room <= 0:
                    return least
                room = 0  # some methods fit a budget only when they are asked for less
                continue
            # The next plan down may have as much overhead: the steps grow, so that a few see enough plans.
            failed, room, step = room, room - max(over, step), 2 * step + 1

    def fitted(self, plan: Plan, limit: int, wanted: int) -> tuple[Plan, int]:
        """The plan with its arena, where it may fit, and how many bytes it is over."""
        over = plan.allocated - wanted
        if plan.allocated > limit:
            return plan, over
        plan = within(plan, self.device, limit)
        return plan, max(over, min(plan.peak - limit, limit >> 7))

    def between(self, plan: Plan, room: int, failed: int | None, limit: int) -> Plan:
        """A faster plan than one that fits, for more bytes and fewer than where none did."""
        if failed is None or not self.device.says_reserved:
            return plan
        for _ in range(_BETWEEN):
            middle = (room + failed) // 2
            other, over = self.fitted(self.made(middle, False)[0], limit, limit)
            if over > 0:
                failed = middle
                continue
            room = middle
            plan = other if other.seconds < plan.seconds else plan
        return plan

    def least(self, smallest: Plan | None = None, most: float = inf) -> Plan:
        """The plan with the smallest peak, of those that allocate no more than `most` if there are any."""
        smallest = smallest or self.made(0, True)[0]
        others = takewhile(lambda plan: plan.allocated <= most, self.upwards(smallest))
        return least_reserving(chain((smallest,), others), self.device)

    def upwards(self, plan: Plan) -> Iterator[Plan]:
        """Plans that allocate more and more than one: they may leave fewer holes."""
        size, last = float(plan.allocated), plan.schedule
        while self.device.says_reserved and (size := size * _APART) < self.whole:
            other = self.made(int(size), False)[0]
            if other.schedule != last:
                yield other
            last = other.schedule
