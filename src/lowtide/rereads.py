"""Which inputs of a step a plan reads at another time than plain PyTorch does."""

from __future__ import annotations

from torch import fx

from .lift import Lifted
from .nodes import traced_in_backward
from .schedule import Run, Schedule
from .trace import Trace

__all__ = ["read_otherwise"]


def read_otherwise(trace: Trace, lifted: Lifted, schedule: Schedule) -> set[fx.Node]:
    """The primals that an op of the forward reads in the backward, or the other way round."""
    values: set[str] = set()
    for steps, late in ((schedule.forward, False), (schedule.backward, True)):
        for step in steps:
            if isinstance(step, Run) and _moved(lifted, step.op, late=late):
                values.update(lifted.graph.op[step.op].reads)
    return {primal for primal in trace.primals if lifted.value_of.get(primal) in values}


def _moved(lifted: Lifted, op: str, *, late: bool) -> bool:
    nodes = (lifted.node_of[op], *lifted.inside.get(op, ()))
    return any(traced_in_backward(node) != late for node in nodes)
