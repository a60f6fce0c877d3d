"""What the report's tables say, as plain rows: what is there at the peak, and what each value costs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from ..graph import Graph
from ..plan import Plan
from ..schedule import Run
from .stays import VALUE, Stay, at_peak, stays

__all__ = ["Alive", "Spent", "alive_at_peak", "spent"]


@dataclass(frozen=True, slots=True)
class Alive:
    """Something that is there at the peak, with the writer's module and source."""

    name: str
    bytes: int
    kind: str
    module: str
    source: str


@dataclass(frozen=True, slots=True)
class Spent:
    """A value that the schedule may drop: `share` is the part of the step's time it is there."""

    name: str
    bytes: int
    share: float
    decided: str
    module: str
    source: str

    @property
    def average(self) -> float:
        """Bytes times lifetime, as bytes averaged over the step."""
        return self.bytes * self.share


def alive_at_peak(plan: Plan) -> list[Alive]:
    """Everything that is there at the peak, largest first; the bytes add up to the peak."""
    return [_alive(stay, plan.graph) for stay in at_peak(plan)]


def _alive(stay: Stay, graph: Graph) -> Alive:
    kind = graph.value[stay.name].kind if stay.what == VALUE else stay.what
    if stay.what in ("workspace", "random state"):
        op = graph.op.get(stay.name)
    else:
        op = None if stay.what in ("fixed", "caller") else graph.writer.get(stay.name)
    return Alive(stay.name, stay.bytes, kind, op.module if op else "", op.source if op else "")


def spent(plan: Plan) -> list[Spent]:
    """The values that the schedule may drop, by bytes times lifetime, largest first."""
    clock = _clock(plan)
    of: dict[str, list[Stay]] = defaultdict(list)
    for stay in stays(plan.graph, plan.schedule):
        if stay.what == VALUE and plan.graph.value[stay.name].droppable:
            of[stay.name].append(stay)
    rows = [_spent(found, plan.graph, clock) for found in of.values()]
    return sorted(rows, key=lambda row: (-row.average, row.name))


def _spent(found: list[Stay], graph: Graph, clock: Sequence[float]) -> Spent:
    name = found[0].name
    there = sum(clock[stay.end] - clock[stay.start] for stay in found)
    op = graph.writer.get(name)
    return Spent(
        name=name,
        bytes=graph.value[name].bytes,
        share=there / clock[-1] if clock[-1] else 0.0,
        decided=_decided(found, graph),
        module=op.module if op else "",
        source=op.source if op else "",
    )


def _decided(found: list[Stay], graph: Graph) -> str:
    if graph.value[found[0].name].kind == "tangent":
        return "given"
    again = sum(stay.again for stay in found)
    times = f"recomputed {again} time{'s' if again != 1 else ''}"
    if any(stay.crosses for stay in found):
        return f"kept, then {times}" if again else "kept"
    return f"dropped and {times}" if again else "dropped after use"


def _clock(plan: Plan) -> list[float]:
    """Seconds up to each step; where no op has a price, every step counts the same."""
    op = plan.graph.op
    seconds = [op[step.op].seconds if isinstance(step, Run) else 0.0 for step in plan.schedule.steps]
    if not any(seconds):
        seconds = [1.0] * len(seconds)
    return list(accumulate(seconds, initial=0.0))
