"""What a schedule decided for each value: to keep it, or to drop it and recompute it, and how often.

One pass over the steps, O(steps + writes): cheap enough to ask of every plan of a frontier.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ..plans.events import VALUE, Allocate, Boundary, Free, events
from ..plans.graph import GIVEN_KINDS, Graph, Value
from ..plans.schedule import Schedule

__all__ = ["Decision", "decisions"]

KEPT, RECOMPUTED, AFTER_USE, HELD = "kept", "recomputed", "dropped after use", "held"
SORTS = (KEPT, RECOMPUTED, AFTER_USE, HELD)
"""The sorts of decisions that the page's filter knows."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What became of a value: `kept` from the forward to the backward, recomputed `again` times.

    `held` says why no schedule may drop it, where none may.
    """

    kept: bool = False
    again: int = 0
    held: str = ""

    def __str__(self) -> str:
        if self.held:
            return self.held
        times = {1: "once", 2: "twice"}.get(self.again, f"{self.again} times")
        if self.again:
            return f"{'kept, then' if self.kept else 'dropped,'} recomputed {times}"
        return KEPT if self.kept else AFTER_USE

    @property
    def sort(self) -> str:
        """One of `SORTS`."""
        if self.held:
            return HELD
        return RECOMPUTED if self.again else KEPT if self.kept else AFTER_USE


def decisions(graph: Graph, schedule: Schedule) -> dict[str, Decision]:
    """The decision for each value of a schedule."""
    there: set[str] = set()
    kept: set[str] = set()
    written: Counter[str] = Counter()
    for event in events(graph, schedule):
        if isinstance(event, Allocate) and event.what == VALUE:
            there.add(event.name)
            written[event.name] += 1
        elif isinstance(event, Free) and event.what == VALUE:
            there.discard(event.name)
        elif isinstance(event, Boundary):
            kept = set(there)
    return {value.name: _decision(value, kept, written[value.name]) for value in graph.values}


def _decision(value: Value, kept: set[str], written: int) -> Decision:
    return Decision(value.kind in GIVEN_KINDS or value.name in kept, max(written - 1, 0), _held(value))


def _held(value: Value) -> str:
    if value.kind in GIVEN_KINDS:
        return "there all along"
    if value.kind == "tangent":
        return "given to the backward"
    if value.kind in ("output", "gradient"):
        return "a result: there to the end"
    return "held by others as well" if value.held else ""
