"""Other orders of first runs: each op as soon as that frees memory, or as late as it is needed.

Problem: program order is what autograd happened to record. A weight gradient that is formed at the end holds
its layer's input and gradient all that time; one that frees nothing yet could wait.

Method: list scheduling (Graham 1966). At every step the next op is the first in program order, but an op that
is ready and leaves fewer bytes than it found goes before it (`eager`), and, in the other order, an op that
frees nothing is put off until something reads it or until it does free (`lazy`). Bytes are counted as when
everything is kept. Random and pinned ops keep their order among themselves, so that the random numbers stay
what they were, and the forward stays before the backward.

Complexity: O(ops log ops + reads + writes).

Limits: a greedy rule, not the order of least peak (which is NP-hard). Callers compare by the simulator.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from ...plans.graph import Graph, Op
from ...plans.order import first_order

__all__ = ["first_orders"]


def first_orders(graph: Graph) -> list[tuple[list[str], list[str]]]:
    """Orders of first runs, without repetition; the first is program order."""
    forward, backward = first_order(graph)
    orders = [(forward, backward)]
    for put_off in (False, True):
        order = _Scheduler(graph, [*forward, *backward], len(forward), put_off).run()
        if order not in orders:
            orders.append(order)
    return orders


class _Scheduler:
    """List scheduling of the first runs; `left[value]` is how many runs still read a value."""

    def __init__(self, graph: Graph, names: Sequence[str], split: int, put_off: bool) -> None:
        self.graph, self.split, self.put_off = graph, split, put_off
        self.ops = [graph.op[name] for name in names]
        place = {op.name: index for index, op in enumerate(self.ops)}
        self.left: dict[str, int] = {}
        self.readers: dict[str, list[int]] = {}
        for index, op in enumerate(self.ops):
            for value in op.reads:
                self.left[value] = self.left.get(value, 0) + 1
                self.readers.setdefault(value, []).append(index)
        self.needs = [self._needs(index, op, place) for index, op in enumerate(self.ops)]
        self.followers: list[list[int]] = [[] for _ in self.ops]
        for index, needs in enumerate(self.needs):
            for other in needs:
                self.followers[other].append(index)
        self.waiting = [len(needs) for needs in self.needs]
        self.done = [False] * len(self.ops)
        self.order: list[int] = []
        self.freeing: list[tuple[int, int]] = []

    def _needs(self, index: int, op: Op, place: dict[str, int]) -> set[int]:
        """The runs that must come before this one."""
        writers = (self.graph.writer.get(value) for value in op.reads)
        needs = {place[writer.name] for writer in writers if writer is not None}
        needs.update(reader for value in op.updates for reader in self.readers.get(value, ()))
        # A chain through the ops that are not pure: each needs the one before it.
        if op.kind != "pure":
            fixed = (i for i in range(index - 1, -1, -1) if self.ops[i].kind != "pure")
            needs.update(i for i in (next(fixed, None),) if i is not None)
        if op.returns:  # the last of the forward
            needs.update(range(index))
        return needs

    def run(self) -> tuple[list[str], list[str]]:
        for phase in (range(self.split), range(self.split, len(self.ops))):
            self.phase = phase
            for index in phase:
                if not self.done[index] and self.waiting[index] == 0:
                    self.offer(index)
            for index in phase:
                if not self.done[index] and not (self.put_off and self.can_wait(index)):
                    self.schedule(index)
            for index in phase:
                if not self.done[index]:
                    self.schedule(index)
        names = [self.ops[index].name for index in self.order]
        return names[: self.split], names[self.split :]

    def schedule(self, index: int) -> None:
        """Run what this one needs and then itself, and with it all that is ready and frees memory."""
        stack = [index]
        while stack:
            late = [other for other in self.needs[stack[-1]] if not self.done[other]]
            if late:
                stack.append(min(late))
                continue
            now = stack.pop()
            if not self.done[now]:
                self.put(now)
                self.drain()

    def drain(self) -> None:
        while self.freeing:
            _, index = heapq.heappop(self.freeing)
            if not self.done[index] and self.growth(index) <= 0:
                self.put(index)

    def put(self, index: int) -> None:
        self.done[index] = True
        self.order.append(index)
        for value in self.ops[index].reads:
            self.left[value] -= 1
            # Whoever reads it last now frees it.
            if self.left[value] == 1:
                for other in self.readers[value]:
                    self.offer(other)
        for other in self.followers[index]:
            self.waiting[other] -= 1
            self.offer(other)

    def offer(self, index: int) -> None:
        if (
            index in self.phase
            and not self.done[index]
            and self.waiting[index] == 0
            and self.growth(index) < 0
        ):
            heapq.heappush(self.freeing, (self.growth(index), index))

    def growth(self, index: int) -> int:
        """The bytes that there are more after a run than before it."""
        value = self.graph.value
        op = self.ops[index]
        written = sum(value[n].bytes for n in op.writes if not value[n].droppable or self.left.get(n))
        return written - sum(value[n].bytes for n in op.reads if value[n].droppable and self.left[n] == 1)

    def can_wait(self, index: int) -> bool:
        """Whether a run may be put off: nothing in its phase's order depends on when it runs."""
        return self.ops[index].kind == "pure" and self.growth(index) > 0
