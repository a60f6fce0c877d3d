"""The smallest cut of a network, by the largest flow through it.

Problem: nodes, and arcs with capacities; choose a side for every node, the source on the near side and the
sink on the far side, such that the arcs from near to far have the least capacity in sum.

Method: Dinitz, "Algorithm for solution of a problem of maximum flow in a network with power estimation"
(1970). Repeat until the sink cannot be reached: measure every node's distance to the sink over arcs with
residual capacity left, then fill all shortest paths. Capacities are whole numbers of any size, so the result
is exact: by Ford and Fulkerson's theorem the flow is the capacity of the cut between what the source still
reaches and the rest.

Complexity: O(nodes² · arcs) at worst. The networks of `bound` are shallow, for almost every node has an
arc to the sink: some ten rounds of O(nodes + arcs) each.

Limits: plain Python, about a million arcs a second and round. Every flow is a valid lower bound of the cut,
so `rounds` may stop the work early; what comes back is then the flow so far and no cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["Cut", "Network"]

SOURCE, SINK = 0, 1


@dataclass(frozen=True)
class Cut:
    """A flow, and the nodes on the near side of the cut; None when the work was stopped early."""

    flow: int
    near: list[bool] | None


@dataclass
class Network:
    """Arcs between numbered nodes; node 0 is the source and node 1 the sink.

    Arc `i` goes from `tails[i]` to `heads[i]`. Capacities are given to `cut`, so that one network does for
    many of them.
    """

    nodes: int
    tails: list[int] = field(default_factory=list)
    heads: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Residual arc 2i is arc i, 2i + 1 its reverse.
        self._head: list[int] = []
        self._leaving: list[list[int]] = [[] for _ in range(self.nodes)]
        for tail, head in zip(self.tails, self.heads, strict=True):
            self._leaving[tail].append(len(self._head))
            self._leaving[head].append(len(self._head) + 1)
            self._head += (head, tail)

    def cut(self, capacities: Sequence[int], *, rounds: int | None = None) -> Cut:
        """The smallest cut, or the flow after the last round."""
        residual = [0] * (2 * len(capacities))
        residual[::2] = capacities
        flow = 0
        while rounds is None or rounds > 0:
            distance = self._distances(residual)
            if distance[SOURCE] < 0:
                return Cut(flow, self._reached(residual))
            flow += self._fill(residual, distance)
            rounds = rounds if rounds is None else rounds - 1
        return Cut(flow, None)

    def _distances(self, residual: list[int]) -> list[int]:
        """Each node's distance to the sink over arcs with residual capacity; -1 where there is no way."""
        distance = [-1] * self.nodes
        distance[SINK] = 0
        head, leaving = self._head, self._leaving
        layer = [SINK]
        while layer and distance[SOURCE] < 0:
            following: list[int] = []
            for node in layer:
                for arc in leaving[node]:
                    other = head[arc]
                    if distance[other] < 0 and residual[arc ^ 1]:
                        distance[other] = distance[node] + 1
                        following.append(other)
            layer = following
        return distance

    def _fill(self, residual: list[int], distance: list[int]) -> int:
        """Fill every shortest path, depth first; `turn` is the arc each node tries next."""
        head, leaving = self._head, self._leaving
        turn = [0] * self.nodes
        path: list[int] = []
        node, flow = SOURCE, 0
        while True:
            if node == SINK:
                amount = min(residual[arc] for arc in path)
                flow += amount
                for arc in path:
                    residual[arc] -= amount
                    residual[arc ^ 1] += amount
                first_full = next(index for index, arc in enumerate(path) if not residual[arc])
                node = head[path[first_full] ^ 1]
                del path[first_full:]
            arcs, index, wanted = leaving[node], turn[node], distance[node] - 1
            while index < len(arcs) and not (residual[arcs[index]] and distance[head[arcs[index]]] == wanted):
                index += 1
            turn[node] = index
            if index < len(arcs):
                path.append(arcs[index])
                node = head[arcs[index]]
            elif path:
                node = head[path.pop() ^ 1]
                turn[node] += 1
            else:
                return flow

    def _reached(self, residual: list[int]) -> list[bool]:
        """Which nodes the source reaches over arcs with residual capacity."""
        near = [False] * self.nodes
        near[SOURCE] = True
        stack = [SOURCE]
        while stack:
            for arc in self._leaving[stack.pop()]:
                other = self._head[arc]
                if residual[arc] and not near[other]:
                    near[other] = True
                    stack.append(other)
        return near
