"""Where the kernels of a compiled step end: which ops may run in one.

Between two kernels of their own (matrix products, convolutions) lies a *window*, in which loops and
reductions fuse. Within it, a reduction over many elements ends a kernel: what needs its result runs after
it, so each window has one *group* of ops or several.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..capture.fx_nodes import tensors_of
from ..capture.lift import Lifted
from ..capture.op_classes import Fusing
from ..plans.graph import Op
from .traffic import elements_read, is_long, parts

__all__ = ["Group", "Kernels"]

Group = tuple[int, int]
"""A window by its number, and how many long reductions deep in it."""


class Kernels:
    """The windows and groups of a graph's ops, in program order; `how` says how each op runs."""

    def __init__(self, lifted: Lifted, how: Mapping[str, Fusing]) -> None:
        self.lifted = lifted
        self.how = how
        self.window = self.windows()
        self.group = self.groups()
        self.members: dict[Group, list[Op]] = {}
        for op in lifted.graph.ops:
            self.members.setdefault(self.group[op.name], []).append(op)

    def windows(self) -> dict[str, int]:
        window, count = {}, 0
        for op in self.lifted.graph.ops:
            count += parts(op, self.how)
            window[op.name] = count
        return window

    def groups(self) -> dict[str, Group]:
        group: dict[str, Group] = {}
        for op in self.lifted.graph.ops:
            window, depth = self.window[op.name], 0
            for name in op.reads:
                writer = self.lifted.graph.writer.get(name)
                if writer is not None and self.window[writer.name] == window:
                    # One level deeper for every long reduction on the way.
                    depth = max(depth, group[writer.name][1] + self.ends_kernel(writer))
            group[op.name] = (window, depth)
        return group

    def ends_kernel(self, op: Op) -> bool:
        """Whether an op is a reduction that ends its kernel, since it runs over too many elements."""
        return self.how[op.name] == "reduction" and is_long(self.lifted.node_of[op.name])

    def alike(self, op: Op) -> list[Op]:
        """The other ops of a group that run over the same shapes: surely in the same kernel."""
        members = [other for other in self.members[self.group[op.name]] if other is not op]
        return [other for other in members if self.shapes(other) == self.shapes(op)]

    def shapes(self, op: Op) -> tuple[Any, ...]:
        node = self.lifted.node_of[op.name]
        return (self.how[op.name], elements_read(node), [tensor.shape for tensor in tensors_of(node)])
