"""Outputs that nobody holds when the backward begins: there until the step returns, and then an activation.

An `output` is the caller's until the end of the step. Where the caller is known to let go of it, as in
`model(**batch).loss.backward()`, its bytes are free from the boundary on: it becomes an `activation`, which a
pinned op of no seconds reads, `return`, the last of the forward (`Op.returns`; the simulator insists on it).
So the value is there when the step returns, may be dropped afterwards, and is kept or recomputed as any other
where the backward reads it. All else, the search and its twin in C, the bound, the report, need not know.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from .events import VALUE, Allocate, Free, Ran, events
from .graph import RETURN, Graph, Op, Value
from .order import first_order
from .schedule import Run, Schedule

__all__ = ["let_go_of", "letting_go", "peak_while_held", "same_runs", "same_step"]

RETURNED = "returned"
"""The output of no bytes that `return` writes, so that it runs in the forward."""


def letting_go(graph: Graph, names: Collection[str]) -> Graph:
    """The graph in which the caller lets go of these outputs as soon as the step has returned.

    >>> from lowtide import Graph, Op, Value
    >>> values = Value("x", 4, "input"), Value("y", 4, "output"), Value("loss", 1, "output")
    >>> graph = Graph((Op("mul", ("x",), ("y",)), Op("sum", ("y",), ("loss",))), values)
    >>> [op.name for op in letting_go(graph, {"y"}).ops], letting_go(graph, {"y"}).value["y"].kind
    (['mul', 'sum', 'return'], 'activation')
    """
    outputs = tuple(value.name for value in graph.values if value.kind == "output")
    early = set(first_order(graph)[0])
    last = max((index for index, op in enumerate(graph.ops) if op.name in early), default=-1)
    op = Op("return", outputs, (RETURNED,), kind="pinned", target=RETURN)
    values = (replace(value, kind="activation") if value.name in names else value for value in graph.values)
    return graph.replace(
        ops=(*graph.ops[: last + 1], op, *graph.ops[last + 1 :]),
        values=(*values, Value(RETURNED, 0, "output")),
    )


def let_go_of(graph: Graph) -> frozenset[str]:
    """The outputs that the caller of a graph's step lets go of."""
    op = graph.returning
    reads = () if op is None else op.reads
    return frozenset(name for name in reads if graph.value[name].kind == "activation")


def same_runs(left: Schedule, right: Schedule) -> bool:
    """Whether two schedules run the same ops in the same order, whatever is returned when."""
    return _runs(left) == _runs(right)


def _runs(schedule: Schedule) -> list[list[str]]:
    parts = (schedule.forward, schedule.backward)
    return [[s.op for s in steps if isinstance(s, Run) and s.op != "return"] for steps in parts]


def same_step(left: Graph, right: Graph) -> bool:
    """Whether two graphs are of one step, whatever its caller holds of what it returns."""
    return _sizes(left) == _sizes(right)


def _sizes(graph: Graph) -> list[tuple[str, int]]:
    return [(value.name, value.bytes) for value in graph.values if value.name != RETURNED]


def peak_while_held(graph: Graph, schedule: Schedule, names: Collection[str]) -> int:
    """The peak of a schedule whose caller holds outputs to the end that it was to let go of.

    A value that is dropped and recomputed is there twice.
    """
    now = held = peak = 0
    returned = False
    left = set(names)
    for event in events(graph, schedule):
        if isinstance(event, Allocate):
            now += event.bytes
        elif isinstance(event, Free):
            now -= event.bytes
            if returned and event.what == VALUE and event.name in left:
                left.remove(event.name)
                held += graph.value[event.name].bytes
        elif isinstance(event, Ran):
            returned = returned or graph.op[event.op].returns
            peak = max(peak, now + held + event.workspace)
        else:
            peak = max(peak, now + held + event.bytes)
    return peak
