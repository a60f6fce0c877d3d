"""Loops that stand apart in the program and yet are one: moved together before ops are fused.

A loop that alone reads what another loop has made, and can write in its place, may stand far from it, with
kernels of their own between the two, as in the backward of a gated MLP: the gate's gradient is begun with
that of the other factor, whose products come first. Right after the other loop it takes no memory that was
not taken anyway, lets go of what else it reads, and fuses: what is between the two is never realized.
"""

from __future__ import annotations

from dataclasses import replace

from ..capture.lift import Lifted
from ..capture.op_classes import fusing
from ..plans.graph import Op
from .kernel_windows import Kernels

__all__ = ["moved_together"]


def moved_together(lifted: Lifted, fused: Lifted) -> Lifted:
    """A graph of single ops with such loops moved up, as they are found in its fused form; itself if none."""
    neighbours = _Neighbours(lifted, fused)
    for op in fused.graph.ops:
        neighbours.look_at(op)
    if not neighbours.followers:
        return lifted
    return replace(lifted, graph=lifted.graph.replace(ops=tuple(neighbours.ops())))


class _Neighbours:
    def __init__(self, lifted: Lifted, fused: Lifted) -> None:
        self.lifted = lifted
        self.fused = fused
        self.how = {op.name: fusing(fused.node_of[op.name]) for op in fused.graph.ops}
        self.window = Kernels(fused, self.how).window
        self.place = {op.name: index for index, op in enumerate(lifted.graph.ops)}
        self.readers: dict[str, list[Op]] = {}
        for op in fused.graph.ops:
            for name in op.reads:
                self.readers.setdefault(name, []).append(op)
        self.followers: dict[str, list[str]] = {}
        self.moved: set[str] = set()

    def look_at(self, op: Op) -> None:
        """Note after which loop an op runs, with all that is computed inside it."""
        value = next((name for name in op.takes if self.may_follow(op, name)), None)
        if value is None:
            return
        writer = self.fused.graph.writer[value].name
        inside = [node.name for node in self.fused.inside[op.name]]
        # Of what is computed inside the op, the part that comes after the writer has to move with it.
        late = [name for name in inside if self.place[name] > self.place[writer]]
        if self.moved.isdisjoint(late) and not any(name in self.fused.graph.op for name in late):
            late.append(op.name)
            self.followers[writer] = late
            self.moved.update(late)
            # So that a third loop can follow the moved one.
            self.place.update((name, self.place[writer]) for name in late)

    def may_follow(self, op: Op, value: str) -> bool:
        """Whether an op could run right after the loop that makes a value, and is not needed where it is."""
        writer = self.fused.graph.writer.get(value)
        if writer is None or self.how[writer.name] != "loop" or writer.phase != op.phase:
            return False
        # In one window they fuse as they are; with another reader the value must wait in memory anyway.
        if self.window[writer.name] == self.window[op.name] or len(self.readers[value]) > 1:
            return False
        before = all(self.place_of(name) <= self.place[writer.name] for name in op.reads)
        return before and op.kind == "pure" and not self.is_read_near(op)

    def place_of(self, value: str) -> int:
        writer = self.fused.graph.writer.get(value)
        return -1 if writer is None else self.place[writer.name]

    def is_read_near(self, op: Op) -> bool:
        """Whether some loop that reads an op's result stands with it, so that those two fuse."""
        near = [reader for name in op.writes for reader in self.readers.get(name, [])]
        return any(
            self.window[reader.name] == self.window[op.name] and self.how[reader.name] != "apart"
            for reader in near
        )

    def ops(self) -> list[Op]:
        order: list[Op] = []
        for op in self.lifted.graph.ops:
            if op.name not in self.moved:
                self.put(op.name, order)
        return order

    def put(self, name: str, order: list[Op]) -> None:
        order.append(self.lifted.graph.op[name])
        for later in self.followers.get(name, ()):
            self.put(later, order)
