"""Which inputs of a step a plan reads at another time than plain PyTorch does."""

from __future__ import annotations

from torch import fx

from ..capture.fx_nodes import traced_in_backward
from ..capture.lift import Lifted
from ..capture.rewrites.batchnorm import recomputed_args
from ..capture.trace import Trace
from ..plans.schedule import Run, Schedule

__all__ = ["read_otherwise"]


def read_otherwise(trace: Trace, lifted: Lifted, schedule: Schedule) -> set[fx.Node]:
    """The primals that an op of the forward reads in the backward, or the other way round."""
    values: set[str] = set()
    ran: set[str] = set()
    for steps, late in ((schedule.forward, False), (schedule.backward, True)):
        for step in steps:
            if isinstance(step, Run) and not lifted.graph.op[step.op].returns:
                if _moved(lifted, step.op, late=late):
                    values.update(_reads(lifted, step.op, again=step.op in ran))
                ran.add(step.op)
    return {primal for primal in trace.primals if lifted.value_of.get(primal) in values}


def _moved(lifted: Lifted, op: str, *, late: bool) -> bool:
    nodes = (lifted.node_of[op], *lifted.inside.get(op, ()))
    return any(traced_in_backward(node) != late for node in nodes)


def _reads(lifted: Lifted, op: str, *, again: bool) -> set[str]:
    """What a run of an op reads; BatchNorm reads its statistics in the first run only."""
    node = lifted.node_of[op]
    kept = recomputed_args(node) if again else node.args
    unread = {lifted.value_of.get(arg) for arg in node.args if isinstance(arg, fx.Node) and arg not in kept}
    return set(lifted.graph.op[op].reads) - {value for value in unread if value is not None}
