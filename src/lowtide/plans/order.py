"""From an order of runs to a schedule: every value is dropped right after its last use.

A solver only decides which op runs when, and how often. Given that order, dropping each value as soon as
nothing reads it before it is next written is best for memory and changes nothing else, so it is done once,
here. O(runs + reads + writes). So is the place of an op that updates a value: nothing may read that
afterwards, so where a method recomputes a reader later, the update waits for it.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterable, Sequence

from .graph import Graph, Op
from .patience import check_time
from .schedule import Drop, Run, Schedule, Step

__all__ = ["first_order", "just_in_time", "updates_after_reads", "with_drops", "without_waste"]


def first_order(graph: Graph) -> tuple[list[str], list[str]]:
    """The order of keeping everything: each op once, in program order.

    The forward runs what its outputs and the pinned forward ops need, and random ops with what is made of
    them (the sketch of an input, say) where the program has them before its backward. All else waits for the
    backward, where pure forward ops run right before the first op that reads them, as autograd runs them.
    """
    needed: set[str] = {value.name for value in graph.values if value.kind == "output"}
    # Some ops lead to nothing that the step hands out; running them would cost time and bytes for nothing.
    useful = _useful(graph)
    needed.update(value for op in _drawn(graph) if op.name in useful for value in op.writes)
    forward: list[str] = []
    for op in reversed(graph.ops):
        if op.phase == "forward" and (op.kind == "pinned" or needed.intersection(op.writes)):
            forward.append(op.name)
            needed.update(op.reads)
    forward.reverse()
    early = set(forward)
    later = [op for op in graph.ops if op.name in useful and op.name not in early]
    # Later random ops stay in program order, too: they draw their numbers in the order in which they run.
    waiting = [op.name for op in later if op.phase == "forward" and op.kind == "pure"]
    idle = set(waiting)
    # What the forward does not need for its outputs is computed where the backward first reads it: keeping it
    # from the forward on would only hold memory.
    backward = just_in_time(graph, (op.name for op in later if op.name not in idle), waiting)
    idle.difference_update(backward)
    return updates_after_reads(graph, forward, backward + [name for name in waiting if name in idle])


def _drawn(graph: Graph) -> list[Op]:
    """Random ops and those that depend on one, up to the first op of the backward."""
    values: set[str] = set()
    found: list[Op] = []
    for op in itertools.takewhile(lambda op: op.phase == "forward", graph.ops):
        if op.kind == "random" or not values.isdisjoint(op.reads):
            values.update(op.writes)
            found.append(op)
    return found


def just_in_time(graph: Graph, runs: Iterable[str], waiting: Iterable[str]) -> list[str]:
    """The runs, with each of the waiting ops right before the first run that reads it, if there is one."""
    left = set(waiting)
    order: list[str] = []
    for name in runs:
        stack = [name]
        while stack:
            writers = (graph.writer.get(value) for value in graph.op[stack[-1]].reads)
            late = next((op.name for op in writers if op is not None and op.name in left), None)
            if late is None:
                order.append(stack.pop())
            else:
                left.remove(late)
                stack.append(late)
    return order


def _useful(graph: Graph) -> set[str]:
    """Ops that a gradient, an output or a pinned op needs."""
    needed = {value.name for value in graph.values if value.kind in ("output", "gradient")}
    useful: set[str] = set()
    for op in reversed(graph.ops):
        if op.kind == "pinned" or needed.intersection(op.writes):
            useful.add(op.name)
            needed.update(op.reads)
    return useful


def without_waste(
    graph: Graph, forward: Sequence[str], backward: Sequence[str]
) -> tuple[list[str], list[str]]:
    """An order without recomputations that write nothing anybody reads before it is written once more."""
    runs = [*forward, *backward]
    places = range(len(runs) - 1, -1, -1)
    first = dict(zip(reversed(runs), places, strict=True))
    bits = graph.bits
    wanted = 0
    kept: list[int] = []
    for index in places:
        name = runs[index]
        reads, writes = bits[name]
        if wanted & writes or first[name] == index:
            kept.append(index)
            wanted = wanted & ~writes | reads
    kept.reverse()
    split = bisect_left(kept, len(forward))
    return [runs[i] for i in kept[:split]], [runs[i] for i in kept[split:]]


def updates_after_reads(
    graph: Graph, forward: Sequence[str], backward: Sequence[str]
) -> tuple[list[str], list[str]]:
    """The order with each update right after the last run that reads what it changes, if that comes later.

    The op after which the step returns is the last of the forward, whatever else waits there.
    """
    if graph.returning is not None and forward and forward[-1] != graph.returning.name:
        forward = [name for name in forward if name != graph.returning.name] + [graph.returning.name]
    runs, split = [*forward, *backward], len(forward)
    if not graph.updaters:
        return runs[:split], runs[split:]
    last: dict[str, int] = {}
    for index, name in enumerate(runs):
        last.update(dict.fromkeys(graph.updaters.get(name, ()), index))
    moved: dict[int, list[str]] = {}
    order: list[list[str]] = []
    for index, name in enumerate(runs):
        late = last.get(name, -1) > index
        if late:
            moved.setdefault(last[name], []).append(name)
        order.append([] if late else [name])
        order[-1] += moved.get(index, ())
    parts = order[:split], order[split:]
    first, second = (list(itertools.chain.from_iterable(part)) for part in parts)
    return first, second


def with_drops(graph: Graph, forward: Sequence[str], backward: Sequence[str]) -> Schedule:
    """The schedule of an order of runs, with each value dropped right after its last use."""
    check_time()
    forward, backward = updates_after_reads(graph, forward, backward)
    runs = [*forward, *backward]
    dying: list[list[str]] = [[] for _ in runs]
    at_start: list[str] = []
    last_use: dict[str, int] = {}
    for index, name in enumerate(runs):
        op = graph.op[name]
        for value in op.writes:
            # Written anew: the copy from before dies at its own last use, which may be long ago.
            if value in last_use and graph.value[value].droppable:
                dying[last_use[value]].append(value)
            last_use[value] = index
        for value in op.reads:
            last_use[value] = index
    for item in graph.values:
        if not item.droppable:
            continue
        if item.name in last_use:
            dying[last_use[item.name]].append(item.name)
        # A gradient that comes from outside and that nobody reads is there all the same, until it is dropped.
        elif item.kind == "tangent":
            at_start.append(item.name)
    split = len(forward)
    backward_steps = [*map(Drop, at_start), *_steps(runs[split:], dying[split:])]
    return Schedule(tuple(_steps(runs[:split], dying[:split])), tuple(backward_steps))


def _steps(runs: Sequence[str], dying: Sequence[list[str]]) -> list[Step]:
    steps: list[Step] = []
    for name, values in zip(runs, dying, strict=True):
        steps.append(Run(name))
        steps.extend(map(Drop, values))
    return steps
