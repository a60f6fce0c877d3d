"""How much to search a graph: by its ops, and by whether there is the compiled search."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .settle import WORK

__all__ = ["Effort", "effort_for"]


@dataclass(frozen=True)
class Effort:
    """How much to search: targets `step` percent apart, numbers of first orders, of exponents, of edits.

    Targets of *fill* are `between` percent apart (0: there are none), `sinks` is how many plans sink.
    `work` is for the search through all orders (see `settle`); `arranged` says whether there are two more
    first orders (see `arrange`); `patience` is how many targets in a row may be missed by grafts.
    Chosen, for some seconds of planning at every size (benchmarks/plan_times.py). At 120 to 130 ops one
    plan in twelve changes by 2 % with half of the edits, none with twice as many.
    """

    step: int
    orders: int
    exponents: int
    edits: int
    tolerance: float = 0.1
    bisections: int = 6
    fine: int = 200
    grafts: int = 3
    sweeps: int = 0
    between: int = 1
    sinks: int = 8
    work: int = 0
    arranged: bool = False
    patience: int | None = None


def effort_for(ops: int, native: bool) -> Effort:
    """The effort for a graph of n ops; without the compiled search it is what takes about as long."""
    if not native:
        return _plain_effort(ops)
    if ops <= 100:
        small = Effort(2, 3, 5, 10_000 * ops, fine=300, sinks=24, work=WORK, arranged=True)
        return replace(small, sweeps=5 if ops <= 60 else 2)
    if ops <= 1000:
        return Effort(5, 3, 5, min(10_000 * ops, 2_000_000), arranged=True)
    if ops <= 3000:
        return Effort(5, 2, 3, 3_000_000, tolerance=0.25, between=0, sinks=2, arranged=True)
    if ops <= 10_000:
        few = Effort(5, 1, 0, 1_000_000, tolerance=0.25, bisections=3, grafts=1)
        return replace(few, between=0, sinks=2, patience=2)
    few = Effort(10, 1, 0, 0, tolerance=0.25, bisections=1, fine=48, grafts=1)
    return replace(few, between=0, sinks=0, patience=2)


def _plain_effort(ops: int) -> Effort:
    if ops <= 500:
        return Effort(5, 1, 3, 0, fine=48, between=0, sinks=0)
    if ops <= 2000:
        return Effort(5, 1, 1, 0, tolerance=0.25, bisections=4, fine=48, between=0, sinks=0)
    return Effort(20, 1, 1, 0, tolerance=0.25, bisections=1, fine=12, between=0, sinks=0)
