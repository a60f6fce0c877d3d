"""A proven lower bound from single moments of a step, for every schedule under a budget in whatever order.

Problem: a solver found a schedule; how much faster could any other one be?

Method: look at one *moment* of a schedule: the end of the forward, or the first run of some op. What is
there at that moment fits under the budget. Let S be the values that are there and may be dropped, A the ops
that run after the moment, P those that ran before it. Of any schedule it is true that

- ops that depend on the moment's op are in A and not in P; ops that it needs are in P;
- an op of A finds each value it reads in S, or the value's writer is in A;
- every op that a gradient, an output or a pinned op needs is in A or in P, and P holds what P needs;
- S, all held values that P wrote, the moment's own reads, writes and workspace, and the saved random states
  of the ops in both A and P lie under the budget together, less one of the reads that the moment's op takes:
  it may write in its place, and the value is not in S then;
- an op in both A and P runs twice: its seconds come on top of running all once. No pinned op is in both.

The least such extra over all (S, A, P) is therefore a lower bound. Without the budget's row it is a smallest
cut (see `mincut`); with the row it is hard, so the row goes into the objective with a price λ ≥ 0 per byte
(Lagrangian relaxation):

    extra ≥ max over λ of  min over (S, A, P) of  seconds(A ∩ P) + λ (bytes(S, A, P) - limit)

which is valid for every λ. The maximum over λ is found by cutting planes: each cut is a line in λ, the next
λ is where the best line with too many bytes meets the best line that fits. If even the cut with the fewest
bytes does not fit, no schedule does, and the bound is infinite. The bound is the best over some moments (see
`moments`) that do not depend on the budget, so it does not grow with it. All is done in whole numbers, with
seconds rounded down.

Complexity: about eight cuts per moment, each some ten rounds of O(ops + reads). A cut that takes more than
`ROUNDS` of them is stopped, which leaves a valid but smaller bound.

Limits: one moment at a time, so it sees what is recomputed once, not what must be recomputed several times;
it is close where half of the memory is asked for and weak near the smallest peak (`several_moments` comes
nearer). Proven up to the rounding of adding up floating-point seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...plans.graph import Graph
from .mincut import SINK, SOURCE, Cut, Network
from .moments import UNITS, Moment, RequiredOps, moments

__all__ = ["CutNetwork", "Line", "bound_by_moments", "extra_of"]

ROUNDS = 4_000_000
"""Arcs that one cut may look at, over all of its rounds."""


def bound_by_moments(graph: Graph, budget: int) -> float:
    """Seconds that no schedule under the budget can beat; infinity when it is proven that none fits."""
    step = RequiredOps(graph)
    if step.least_bytes() > budget:
        return math.inf
    extra = 0
    for moment in moments(step):
        found = extra_of(CutNetwork(step, moment), budget, extra)
        if found is None:
            return math.inf
        extra = found
    return step.once * (1 + extra / UNITS) if extra else step.once


@dataclass(frozen=True)
class Line:
    """What one choice of (S, A, P) costs: seconds of recomputation, and bytes at the moment."""

    seconds: int
    bytes: int

    def at(self, price: int) -> int:
        return self.seconds + price * self.bytes


def extra_of(network: CutNetwork, budget: int, known: int) -> int | None:
    """Units of recomputation that must be, known before or because of a moment; None if nothing fits."""
    limit = budget - network.size
    everything_recomputed = Line(sum(network.seconds), 0)
    # At this price a byte costs more than recomputing everything, so the cut has the fewest bytes there are.
    fewest = network.cut(everything_recomputed.seconds + 1)[0] or everything_recomputed
    if fewest.bytes > limit:
        return None
    most, flow = network.cut(1)
    best = max(flow - limit, known)
    while most is not None and most.bytes > limit and most.seconds < fewest.seconds:
        # A whole number: capacities stay exact, and any price gives a valid bound.
        price = (fewest.seconds - most.seconds) // (most.bytes - fewest.bytes)
        # Both lines are above what any price gives, so where they meet is the most that can still be found.
        if most.at(price) + (most.bytes - limit) - price * limit <= best:
            break
        line, flow = network.cut(price)
        best = max(best, flow - price * limit)
        # No line below the two: their meeting is the maximum of the dual.
        if line is None or flow >= min(most.at(price), fewest.at(price)):
            break
        if line.bytes > limit:
            most = line
        else:
            fewest = line
    return best


class CutNetwork:
    """The network of a moment, in which every cut is a choice of (S, A, P).

    Each op has two nodes: near the source means "runs after the moment" for the one and "did not run before
    it" for the other. Each value that several ops read has a node for "is read after the moment". Nodes that
    certainly are on one side are the source or the sink themselves. An arc has seconds, bytes, or no end of
    capacity; `size` is the bytes that are there whatever is chosen.
    """

    def __init__(self, step: RequiredOps, moment: Moment) -> None:
        self.step, self.moment = step, moment
        self.size = moment.size
        self.nodes = 2
        self.arcs: dict[tuple[int, int], list[int]] = {}
        self.endless: set[tuple[int, int]] = set()
        self.runs_after = [SOURCE if after else self.new() for after in moment.after]
        self.missed = [
            SINK if before else SOURCE if after else self.new()
            for before, after in zip(moment.before, moment.after, strict=True)
        ]
        self.add_ops()
        self.add_values()
        self.close()

    def new(self) -> int:
        self.nodes += 1
        return self.nodes - 1

    def arc(self, tail: int, head: int, *, seconds: int = 0, size: int = 0) -> None:
        both = self.arcs.setdefault((tail, head), [0, 0])
        both[0] += seconds
        both[1] += size

    def force(self, tail: int, head: int) -> None:
        """If the tail is near the source, then the head is."""
        if head != SOURCE and tail != SINK:
            self.arcs.setdefault((tail, head), [0, 0])
            self.endless.add((tail, head))

    def add_ops(self) -> None:
        writer = self.step.writer
        for index, op in enumerate(self.step.ops):
            again, missed = self.runs_after[index], self.missed[index]
            if again == SOURCE:
                continue
            self.arc(again, missed, seconds=self.step.units[index], size=op.state)
            # It may not run on both sides: crossing this arc costs without end.
            if op.kind == "pinned":
                self.force(again, missed)
            self.arc(SOURCE, missed, size=self.step.held_bytes(op))
            # Not run before means that it runs after: every op of the step runs at some time.
            self.force(missed, again)
            for name in op.reads:
                if name in writer:
                    self.force(self.missed[writer[name]], missed)

    def add_values(self) -> None:
        """S holds what an op of A reads and no op of A writes."""
        readers: dict[str, set[int]] = {}
        for index, op in enumerate(self.step.ops):
            for name in op.reads:
                readers.setdefault(name, set()).add(self.runs_after[index])
        for name, tails in readers.items():
            value = self.step.graph.value[name]
            if value.droppable and name not in self.moment.there and name not in self.moment.settled:
                writer = self.step.writer.get(name)
                self.add_value(value.bytes, tails, SINK if writer is None else self.runs_after[writer])

    def add_value(self, size: int, tails: set[int], writer: int) -> None:
        if writer == SOURCE:
            return
        # One reader, or a certain one, needs no node in between.
        if SOURCE in tails or len(tails) == 1:
            self.arc(SOURCE if SOURCE in tails else min(tails), writer, size=size)
            return
        node = self.new()
        for tail in tails:
            self.force(tail, node)
        self.arc(node, writer, size=size)

    def close(self) -> None:
        """Number what the source reaches, and take out the arcs that every cut crosses."""
        always = self.arcs.pop((SOURCE, SINK), [0, 0])
        self.size += always[1]
        leaving: dict[int, list[int]] = {}
        for (tail, head), both in self.arcs.items():
            if any(both) or (tail, head) in self.endless:
                leaving.setdefault(tail, []).append(head)
        number = {SOURCE: 0, SINK: 1}
        stack = [SOURCE]
        while stack:
            for head in leaving.get(stack.pop(), ()):
                if head not in number:
                    number[head] = len(number)
                    stack.append(head)
        self.number = number
        kept = [(tail, head) for tail in leaving if tail in number for head in leaving[tail]]
        self.seconds = [self.arcs[pair][0] for pair in kept]
        self.bytes = [self.arcs[pair][1] for pair in kept]
        self.no_end = [pair in self.endless for pair in kept]
        tails, heads = ([number[pair[side]] for pair in kept] for side in (0, 1))
        self.network = Network(len(number), tails, heads)

    def cut(self, price: int) -> tuple[Line | None, int]:
        """The smallest cut when a byte costs `price` (None when it takes too long), and a flow."""
        found = self.solve(price)
        return self.line(found), found.flow

    def solve(self, price: int) -> Cut:
        """The smallest cut as sides of the nodes."""
        capacities = [a + price * b for a, b in zip(self.seconds, self.bytes, strict=True)]
        no_end = sum(capacities) + 1
        capacities = [no_end if e else c for e, c in zip(self.no_end, capacities, strict=True)]
        return self.network.cut(capacities, rounds=20 + ROUNDS // (len(capacities) + 1))

    def line(self, cut: Cut) -> Line | None:
        """What a cut costs."""
        near = cut.near
        if near is None:
            return None
        pairs = zip(self.network.tails, self.network.heads, strict=True)
        crossing = [arc for arc, (tail, head) in enumerate(pairs) if near[tail] and not near[head]]
        return Line(sum(self.seconds[a] for a in crossing), sum(self.bytes[a] for a in crossing))

    def recomputed(self, cut: Cut) -> list[str]:
        """The ops that run both before and after the moment."""
        near = cut.near
        if near is None:
            return []

        def is_near(node: int) -> bool:
            return node == SOURCE or (node != SINK and node in self.number and near[self.number[node]])

        nodes = zip(self.step.ops, self.runs_after, self.missed, strict=True)
        return [op.name for op, again, missed in nodes if is_near(again) and not is_near(missed)]
