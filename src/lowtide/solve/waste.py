"""`plans.order.without_waste` at native speed: methods for chains ask it of orders of 10^5 runs.

The same runs stay; without the compiled search it is the slower twin that is asked.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from ..plans import order as plain
from ..plans.graph import Graph
from .search.native import NoMemory, done, library

__all__ = ["without_waste"]

Numbers = npt.NDArray[np.int32]


def without_waste(
    graph: Graph, forward: Sequence[str], backward: Sequence[str]
) -> tuple[list[str], list[str]]:
    """An order without recomputations that write nothing anybody reads before it is written once more."""
    if library() is None:
        return plain.without_waste(graph, forward, backward)
    runs = [*forward, *backward]
    try:
        kept = _flow(graph).needed(runs)
    except NoMemory:
        return plain.without_waste(graph, forward, backward)
    split = int(np.searchsorted(kept, len(forward)))
    places = kept.tolist()
    return [runs[place] for place in places[:split]], [runs[place] for place in places[split:]]


class _Flow:
    """Which values the ops of a graph read and write, by number."""

    def __init__(self, graph: Graph) -> None:
        self.ops, self.values = len(graph.ops), len(graph.values)
        self.op = {op.name: index for index, op in enumerate(graph.ops)}
        value = {item.name: index for index, item in enumerate(graph.values)}
        self.arrays = [
            *_joined([[value[name] for name in op.reads] for op in graph.ops]),
            *_joined([[value[name] for name in op.writes] for op in graph.ops]),
        ]

    def needed(self, runs: Sequence[str]) -> Numbers:
        """The places of the runs that are not in vain."""
        found = library()
        assert found is not None, "there is no compiled search"
        order = np.fromiter(map(self.op.__getitem__, runs), dtype=np.int32, count=len(runs))
        kept = np.empty(len(runs), dtype=np.int32)
        pointers = [ctypes.c_void_p(array.ctypes.data) for array in (*self.arrays, order)]
        count = found.lowtide_needed(self.ops, self.values, *pointers, len(runs), kept.ctypes.data)
        return kept[: done(count)]


def _joined(many: list[list[int]]) -> tuple[Numbers, Numbers]:
    """Where each list starts, and all of them in one."""
    starts = np.concatenate(([0], np.cumsum([len(values) for values in many])))
    return starts.astype(np.int32), np.array([v for values in many for v in values], dtype=np.int32)


@lru_cache(maxsize=1)
def _flow(graph: Graph) -> _Flow:
    return _Flow(graph)
