"""The bytes that a scan holds while it takes its actions: the same rules as `loop`, in numbers.

Nothing is taken from how the actions were chosen, so that this is the judge of every plan; the allocator is
the judge of this.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..solve.sequence import Backward, Forward, Load, Pop, Push
from ..solve.sequence.actions import Action
from .sizes import Sizes

__all__ = ["is_recomputed_from", "peak_of", "records_last"]


def records_last(action: Forward, following: Action | None) -> bool:
    """Whether the last unit of a run is recorded: because it goes backward next, or is kept."""
    last = action.stop - 1
    return following in (Backward(last), Push(last, "internal"))


def is_recomputed_from(following: Action | None) -> bool:
    """Whether steps are recomputed from the state that a recorded unit hands on, by what follows on it."""
    return isinstance(following, Forward) and following.stop - following.start > 1


def peak_of(actions: Iterable[Action], sizes: Sizes) -> int:
    """The most bytes that a scan holds at once."""
    ledger = _Ledger(sizes)
    ahead = iter(actions)
    action = next(ahead, None)
    while action is not None:
        following = next(ahead, None)
        ledger.count(action, following)
        action = following
    return ledger.peak


class _Ledger:
    """What is kept and what lies in the workspace: the carry, if it is nowhere else, and a record."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.kept = sizes.start
        self.carry = 0
        self.record: int | None = None
        self.records: dict[int, tuple[int, int]] = {}
        self.gradient = 0
        self.peak = 0

    def count(self, action: Action, following: Action | None) -> None:
        match action:
            case Forward(start, stop):
                self.forward(stop - start, record=records_last(action, following))
            case Backward(step):
                self.backward(step)
            case Push(at, "hidden"):
                self.kept += self.sizes.state
                self.carry = 0
            case Push(at, _):
                assert self.record is not None
                random = self.sizes.start if is_recomputed_from(following) else 0
                self.records[at] = self.record, random
                self.kept += self.record + random
                self.record, self.carry = None, 0
            case Pop(_, "hidden"):
                self.kept -= self.sizes.state
            case Load():
                self.record, self.carry = None, 0

    def forward(self, units: int, *, record: bool) -> None:
        self.record = None
        for unit in range(min(units, 3)):  # from the second on they are all alike, but for the last
            self.note(self.kept + self.carry + self.gradient + self.sizes.run)
            if record and unit == min(units, 3) - 1:
                self.record, self.carry = self.carry + self.sizes.record, 0
            else:
                # The random state that a kept carry has with it is not in the workspace.
                self.carry = self.sizes.state - self.sizes.start

    def backward(self, step: int) -> None:
        if step in self.records:
            record, random = self.records.pop(step)
            self.kept -= record + random
        else:
            assert self.record is not None
            record, self.record = self.record, None
        self.note(self.kept + self.carry + record - self.sizes.record + self.sizes.backward)
        self.gradient = self.sizes.gradient

    def note(self, held: int) -> None:
        self.peak = max(self.peak, held)
