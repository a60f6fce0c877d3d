"""The stages of a captured graph as a chain: which cuts to keep.

The outputs of the chain are the bytes that cross the cuts between stages. A segment of stages i to j-1 is
recomputed from what crosses cut i and then goes backward. Its law looks at two moments. While stage k is
recomputed: what the stages before it in the segment saved, the working bytes of its forward, and the
gradients that wait for the segment. While stage k goes backward: what the stages up to it saved, the working
bytes of its backward, and the gradients that are there by then; of what crosses cut i only the part that some
backward reads is still needed. So the law is not monotone, and the quadratic algorithm it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np

from ..chain_stages import Action, Stages
from .search import long_end, quadratic, walk

__all__ = ["StageLaw", "kept_cuts", "segment_actions"]


@dataclass(frozen=True)
class StageLaw:
    """The bytes that reversing the stages between two cuts takes, beside what crosses the kept cuts."""

    stages: Stages
    monotone: bool = False

    def __call__(self, i: int, j: int) -> int:
        return self.row(i)[j - i - 1]

    def sweep(self) -> Callable[[int, int], int]:
        return self

    def row(self, i: int) -> list[int]:
        before = self._kept[i:-1] - self._kept[i]
        again = np.maximum.accumulate(before + self._forward[i:]) + self._waiting[i:]
        again[-1] -= self._waiting[-1]  # the last segment is not recomputed: it goes backward at once
        back = np.maximum.accumulate(before + self._backward[i:]) - self.loose[i]
        found: list[int] = np.maximum(again, back).tolist()
        return found

    @cached_property
    def _kept(self) -> np.ndarray:
        return np.array([0, *accumulate(self.stages.saved)], dtype=np.int64)

    @cached_property
    def _forward(self) -> np.ndarray:
        return np.array(self.stages.forward_work, dtype=np.int64)

    @cached_property
    def _waiting(self) -> np.ndarray:
        return np.array([waiting for waiting, _ in self._levels], dtype=np.int64)

    @cached_property
    def _backward(self) -> np.ndarray:
        return np.array([most for _, most in self._levels], dtype=np.int64)

    @cached_property
    def _levels(self) -> list[tuple[int, int]]:
        """For each stage the gradients that wait for its backward, and the most bytes while it runs.

        The second counts what the stage saved as well, each value until its last use.
        """
        graph, stages = self.stages.graph, self.stages
        order = [graph.op[name] for names in reversed(stages.backward) for name in names]
        ends = {value: op.name for op in order for value in op.reads}
        levels: list[tuple[int, int]] = []
        there: dict[str, int] = {}
        done: set[str] = set()
        for forward, backward in zip(reversed(stages.forward), reversed(stages.backward), strict=True):
            waiting = most = sum(there.values())
            saved = [value for name in forward for value in graph.op[name].writes]
            saved = [value for value in saved if value in ends and ends[value] not in done]
            there.update((value, graph.value[value].bytes) for value in saved)
            now = sum(there.values())
            for op in (graph.op[name] for name in backward):
                new = sum(graph.value[value].bytes for value in op.writes)
                most = max(most, now + new + op.workspace)
                there.update((value, graph.value[value].bytes) for value in op.writes)
                dead = [v for v in (*op.reads, *op.writes) if ends.get(v, op.name) == op.name]
                now += new - sum(there.pop(v, 0) for v in dead if graph.value[v].droppable)
            done.update(backward)
            levels.append((waiting, most))
        return levels[::-1]

    @cached_property
    def loose(self) -> list[int]:
        """The bytes that cross each cut and that no backward reads: only needed to recompute the segment."""
        graph, stages = self.stages.graph, self.stages
        kept = {value for names in stages.backward for name in names for value in graph.op[name].reads}
        last_read = {
            value: index
            for index, names in enumerate(stages.forward)
            for name in names
            for value in graph.op[name].reads
        }
        spans = []
        for index, names in enumerate(stages.forward):
            for value in (graph.value[v] for name in names for v in graph.op[name].writes):
                if value.droppable and value.name not in kept:
                    spans.append((index + 1, last_read.get(value.name, index) + 1, value.bytes))
        return _cover(spans, len(stages) + 1)


def _cover(spans: Iterable[tuple[int, int, int]], count: int) -> list[int]:
    """For each place the bytes of the spans (start, end, bytes) that cover it, the end excluded."""
    change = [0] * (count + 1)
    for start, end, size in spans:
        if start < end:
            change[start] += size
            change[end] -= size
    return list(accumulate(change))[:count]


def kept_cuts(stages: Stages, bounds: int) -> list[tuple[int, ...]]:
    """The cuts to keep for the least peak, and for n bounds up to the peak of one segment.

    For a bound the last segment, which need not be recomputed, is as long as it can be.
    """
    law = StageLaw(stages)
    sizes = stages.crossing
    least = quadratic(sizes, law)
    most = max(sizes[0] + law(0, len(stages)), least[0])
    shares = [(step / max(bounds - 1, 1)) ** 2 for step in range(bounds)]
    limits = [least[0] + int((most - least[0]) * share) for share in shares]
    found = [walk(sizes, least, least[0], law), *(long_end(sizes, law, limit) for limit in limits)]
    return list(dict.fromkeys(found))


def segment_actions(kept: Sequence[int]) -> list[Action]:
    """The segments from last to first: recomputed, except the last, then backward."""
    actions: list[Action] = []
    for start, end in reversed(list(pairwise(kept))):
        if end != kept[-1]:
            actions += [("forward", stage) for stage in range(start, end)]
        actions += [("backward", stage) for stage in range(end - 1, start - 1, -1)]
    return actions
