"""Keeps Inductor to the order of the plan.

Inductor receives its nodes in the plan's order, fuses some of them and then orders the fused ones anew. A
value that the plan computes late, right before it is needed, must not be pulled to an early reader of its
inputs for the sake of a fusion, nor the other way round. So two nodes fuse where they stand together, with no
kernel of its own between them, or where what moves is small; and the fused nodes run where the plan has the
first of them that is not small.
"""

from __future__ import annotations

import heapq
from itertools import accumulate
from operator import attrgetter
from typing import Any

from ..._torch import private, scheduler_pass

__all__ = ["Fusions", "PlannedOrder"]

_SMALL = 64
"""What is this many times smaller than the largest buffer may move. Chosen, as in `fusion/fused_graph.py`:
what the plan does not realize there is not held to its place here. Not varied by itself."""


class Fusions(private("InductorChoices")):  # type: ignore[misc]
    """Inductor's own choices, but for fusions that would undo the plan's order."""

    @staticmethod
    def can_fuse(scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
        allowed = private("InductorChoices").can_fuse(scheduler, node1, node2, shared_data_score)
        return bool(allowed) and stand_together(scheduler, node1, node2)


def stand_together(scheduler: Any, node1: Any, node2: Any) -> bool:
    """Whether no kernel of its own lies between two nodes, or only what is small would move."""
    windows, small = _windows(scheduler)
    parts = [*node1.get_nodes(), *node2.get_nodes()]
    places = {windows[part.min_order] for part in parts if _written(part) > small}
    # Large parts of two windows never fuse; where all are small it does not matter where they run.
    if len(places) != 1:
        return not places
    (place,) = places
    group = {name for part in parts for name in part.get_buffer_names()}
    return all(_may_move(scheduler, part, place, group) for part in parts)


def _may_move(scheduler: Any, part: Any, place: int, group: set[str]) -> bool:
    """Whether what a node reads is there by then, and whoever reads it runs no earlier."""
    windows, _ = _windows(scheduler)
    window = windows[part.min_order]
    if window > place:
        names = [dep.name for dep in part.unmet_dependencies if dep.name not in group]
        writers = [scheduler.name_to_buf[name].defining_op for name in names if name in scheduler.name_to_buf]
        return all(windows[writer.min_order] <= place for writer in writers if writer is not None)
    if window < place:
        users = [user.node for buffer in part.get_outputs() for user in buffer.users]
        return all(windows[user.min_order] >= place for user in users if hasattr(user, "min_order"))
    return True


def _windows(scheduler: Any) -> tuple[dict[int, int], int]:
    """How many kernels of their own precede each place in the order, and what is small.

    Copies into one concatenation are a single node of the scheduler; their places are those of its parts.
    """
    # Asked for every pair that could fuse, so it is kept on the scheduler, which lives for one graph.
    known: tuple[dict[int, int], int] | None = getattr(scheduler, "_lowtide_windows", None)
    if known is None:
        parts = sorted(
            (part for node in scheduler.nodes for part in node.get_nodes()), key=attrgetter("min_order")
        )
        small = small_bytes(parts)
        counts = accumulate(_parts(part, small) for part in parts)
        known = ({part.min_order: count for part, count in zip(parts, counts, strict=True)}, small)
        scheduler._lowtide_windows = known
    return known


def _parts(node: Any, small: int) -> bool:
    """Whether a node is a kernel of its own that stays in its place; seeds can be drawn earlier."""
    apart = node.is_extern() or node.is_template()
    return bool(apart) and (bool(node.read_writes.reads) or _written(node) > small)


def small_bytes(nodes: list[Any]) -> int:
    """The bytes that count as small among these nodes."""
    return max(map(_written, nodes), default=0) // _SMALL


def _written(node: Any) -> int:
    return sum(_bytes(buffer.node) for buffer in node.get_outputs())


def _bytes(buffer: Any) -> int:
    try:
        return int(buffer.get_numel()) * int(buffer.get_dtype().itemsize)
    except (NotImplementedError, AttributeError, TypeError):  # a tuple, or no tensor at all
        return 0


class PlannedOrder(scheduler_pass()):  # type: ignore[misc]
    """Orders fused nodes by their place in the plan, as far as what they read allows."""

    def __call__(self, nodes: list[Any]) -> list[Any]:
        small = small_bytes([part for node in nodes for part in node.get_nodes()])
        place = [_place(node, small) for node in nodes]
        writer = {name: index for index, node in enumerate(nodes) for name in node.get_buffer_names()}
        needs = [_needs(index, node, writer) for index, node in enumerate(nodes)]
        waiting = [len(needed) for needed in needs]
        readers: list[list[int]] = [[] for _ in nodes]
        for index, needed in enumerate(needs):
            for other in needed:
                readers[other].append(index)
        # A topological order (Kahn's), of the ready nodes always the one that the plan has first.
        ready = [(place[index], index) for index, count in enumerate(waiting) if not count]
        heapq.heapify(ready)
        order: list[Any] = []
        while ready:
            _, index = heapq.heappop(ready)
            order.append(nodes[index])
            for reader in readers[index]:
                waiting[reader] -= 1
                if not waiting[reader]:
                    heapq.heappush(ready, (place[reader], reader))
        return order

    def uuid(self) -> Any:
        # Part of Inductor's cache key: to be counted up whenever the order changes, or old code is used.
        return "lowtide scheduler order 3"


def _place(node: Any, small: int) -> int:
    parts = node.get_nodes()
    large = [part for part in parts if _written(part) > small]
    return int(min(part.min_order for part in large or parts))


def _needs(index: int, node: Any, writer: dict[str, int]) -> set[int]:
    needed = {writer[dep.name] for dep in node.unmet_dependencies if dep.name in writer}
    return needed - {index}
