"""Where the bytes go: each value by bytes times lifetime, with what was decided, identical layers folded."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from .decision import Decision
from .fold import Fold, fold
from .place import Place, Places
from .residency import Residency
from .stays import VALUE

__all__ = ["Group", "Spent", "folded", "spent"]


@dataclass(frozen=True, slots=True)
class Spent:
    """A value or a fixed band: `share` is the part of the step's time during which it is there."""

    name: str
    bytes: int
    share: float
    decided: Decision
    place: Place

    @property
    def average(self) -> float:
        """Bytes times lifetime, as bytes averaged over the step."""
        return self.bytes * self.share


@dataclass(frozen=True, slots=True)
class Group(Fold[Spent]):
    """Values that are alike."""

    @property
    def average(self) -> float:
        """Bytes times lifetime of all members, as bytes averaged over the step."""
        return sum(member.average for member in self.members)


def spent(shown: Residency, places: Places) -> list[Spent]:
    """All that is on the device, by bytes times lifetime, largest first."""
    clock = shown.clock
    there: dict[str, float] = defaultdict(float)
    for stay in shown.stays:
        if stay.what == VALUE:
            there[stay.name] += clock[stay.end] - clock[stay.start]
    whole = clock[-1] or 1.0
    size = shown.graph.value
    rows = [
        Spent(name, size[name].bytes, seconds / whole, shown.decisions[name], places.of_value(name))
        for name, seconds in there.items()
    ]
    always = Decision(held="there all along")
    rows += [Spent(name, size, 1.0, always, Place(name, "fixed")) for name, size in shown.graph.fixed.items()]
    return sorted(rows, key=lambda row: (-row.average, row.name))


def folded(rows: list[Spent]) -> list[Group]:
    """The rows with identical layers in one; what nobody decided (parameters) folds whatever its size."""
    found = fold(rows, path=lambda row: row.place.path, alike=_alike)
    groups = [Group(item.where, item.members) for item in found]
    return sorted(groups, key=lambda group: -group.average)


def _alike(row: Spent) -> tuple[str, str, Decision, int]:
    return row.place.what, row.place.source, row.decided, 0 if row.decided.held else row.bytes
