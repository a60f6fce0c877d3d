"""A graph as a chain of blocks with several ways to keep each: what `rotor` plans over.

Problem: the dynamic programme of `table` knows stages with sizes, seconds and options, and answers with
actions. A graph has ops, and a schedule is an order of runs.

Method: the forward is cut into stages (see `choose_cuts`). What crosses a cut is the stage's output; values
that cross several cuts count once; the bytes that the backward hands on at each cut are its gradient. A block
is a stage or several neighbouring ones, so that the programme also chooses where blocks begin and end. Each
block gets its ways from `ways`; blocks of equal structure, sizes and seconds get them once. Cuts are
chosen to make Σ crossing bytes + scale · Σ (saved bytes of a stage)² the least, with the scale that
gives the wanted number of stages: cheap cuts, and stages of similar weight.

Complexity: O(places²) for the cuts, at most `PLACES` of them, and O(ops · widths · ways) for the blocks.

Limits: those of `stages` and `ways`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from ...plans.graph import Graph
from ...plans.order import first_order
from ..chain_stages import Stages, crossing_bytes
from ..waste import without_waste
from .chain import Action, Stage
from .ways import Block, Places, Way

__all__ = ["Blocks", "choose_cuts"]

PLACES = 1000
ROUNDS = 14

Floats = npt.NDArray[np.float64]


class Blocks:
    """The stages of a graph as a chain: `chain` and `shared` make a `ChainTable`, `order` reads its plans.

    `ways[i]` has the ways of all blocks that begin with stage i, one for each option of the chain's stage.
    """

    def __init__(self, stages: Stages, *, widths: Sequence[int], ways: int) -> None:
        self.stages, self.graph = stages, stages.graph
        self.places = Places(stages)
        self.gradient = self._gradients()
        known: dict[object, list[Way]] = {}
        self.ways: list[list[tuple[Way, Block]]] = []
        for first in range(len(stages)):
            ends = [first + width - 1 for width in widths if first + width <= len(stages)]
            found: list[tuple[Way, Block]] = []
            for block in [self._block(first, last) for last in ends]:
                # A network of 24 equal layers asks this 24 times: blocks that look alike share their ways.
                if (key := block.key()) not in known:
                    known[key] = block.ways(ways)
                found += [(way, block) for way in known[key]]
            self.ways.append(found)
        self.plain = [self._block(i, i).needed(self._block(i, i).leaving) for i in range(len(stages))]
        self.chain = tuple(self._stage(index) for index in range(len(stages)))

    @property
    def ample(self) -> int:
        """About the bytes that keeping every stage in full takes, a little on the safe side."""
        kept = sum(self.places.bytes(ways[0][1].read | ways[0][1].leaving) for ways in self.ways)
        # 10 % more than the model's own sum: its bytes are rounded up to units, and a table that is too small
        # would refuse plans that fit.
        return int(1.1 * (kept + max(self.gradient) + sum(stage.leaves for stage in self.chain))) + 1

    def order(self, actions: Iterable[Action]) -> tuple[list[str], list[str]]:
        """The order of runs of a plan: what comes before its first backward is the forward itself."""
        forward = [name for stage in self.stages.forward for name in stage]
        backward: list[str] = []
        in_backward = False
        for verb, stage, option in actions:
            in_backward = in_backward or verb == "backward"
            way, block = self.ways[stage][option]
            if verb == "forward":
                again: Iterable[str] = self.plain[stage]
            else:
                again = [block.ops[i] for i in (way.backward if verb == "backward" else way.forward)]
            backward += again if in_backward else []
        return without_waste(self.graph, forward, backward)

    def shared(self) -> list[list[int]]:
        """shared[i][j] = the bytes that cross both the cut before stage i and the one before stage j."""
        count = len(self.stages) + 1
        table = np.zeros((count, count), dtype=np.int64)
        for value, (low, high) in self.places.span.items():
            table[low, high] += self.places.size[value]
        # Values by the cuts they span, summed from both sides: a value from cut 1 to 5 crosses (2, 4), too.
        sums: list[list[int]] = table[:, ::-1].cumsum(axis=0).cumsum(axis=1)[:, ::-1].tolist()
        return sums

    def _block(self, first: int, last: int) -> Block:
        return Block(self.places, first, last, self.gradient[last])

    def _stage(self, index: int) -> Stage:
        places, runs, leaving = self.places, self.plain[index], self._block(index, index).leaving
        crossing = [v for v, (low, high) in places.span.items() if low <= index + 1 <= high]
        written = [v for name in self.stages.backward[index] for v in self.graph.op[name].writes]
        return Stage(
            places.bytes(crossing),
            tuple(way.option for way, _ in self.ways[index]),
            forward=places.seconds(runs),
            temp=places.peak(runs, 0, set(), leaving) - places.bytes(leaving),
            gradient=self.gradient[index],
            leaves=sum(self.graph.value[value].bytes for value in written if value not in places.size),
        )

    def _gradients(self) -> list[int]:
        """The bytes that the backward hands from the stages after each stage to it and to those before."""
        count, places = len(self.stages), self.places
        origin = {value.name: count for value in self.graph.values if value.kind == "tangent"}
        for index, names in enumerate(self.stages.backward):
            origin.update((value, index) for name in names for value in self.graph.op[name].writes)
        change = [0] * (count + 1)
        for value, index in origin.items():
            last = places.last_read.get(value, index)
            if last < index and value in places.size:
                change[last] += places.size[value]
                change[index] -= places.size[value]
        return list(accumulate(change))[:count]


def choose_cuts(graph: Graph, most: int) -> list[int]:
    """Where to cut the forward list into at most `most` stages of similar weight."""
    forward, backward = first_order(graph)
    crossing = crossing_bytes(graph, forward)
    places = _places(crossing)
    if len(places) < 2 or most < 2:
        return []
    read = {value for name in backward for value in graph.op[name].reads if graph.value[value].droppable}
    saved = [sum(graph.value[v].bytes for v in graph.op[name].writes if v in read) for name in forward]
    # A little weight for every op, so that stages of nothing but views do not come for free.
    light = (sum(saved) or len(saved)) / len(saved) / 50
    weight = np.array([0.0, *accumulate(size + light for size in saved)])[places]
    # No cut is free, else as many as possible would be made where nothing crosses.
    price = np.maximum(np.array(crossing, dtype=np.float64)[places], weight[-1] / most / 4)
    return [places[index] for index in _bisect(price, weight, most)]


def _places(crossing: Sequence[int]) -> list[int]:
    """Both ends and the places worth a cut: all, or the cheapest of each of `PLACES` equal parts."""
    end = len(crossing) - 1
    if end <= PLACES:
        return list(range(end + 1))
    bounds = [1 + (end - 1) * part // PLACES for part in range(PLACES + 1)]
    parts = [range(start, stop) for start, stop in pairwise(bounds)]
    return [0, *(min(part, key=lambda place: (crossing[place], place)) for part in parts), end]


def _bisect(price: Floats, weight: Floats, most: int) -> list[int]:
    """The cuts with the largest scale that makes at most `most` stages."""
    # Exponents of ten: 24 decades of scale, halved ROUNDS times, leave 0.0015 of a decade.
    low, high = -12.0, 12.0
    best: list[int] = []
    for _ in range(ROUNDS):
        middle = (low + high) / 2
        cuts = _cuts(price, weight, 10.0**middle / float(weight[-1]))
        if len(cuts) < most:
            best, low = cuts, middle
        else:
            high = middle
    return best


def _cuts(price: Floats, weight: Floats, scale: float) -> list[int]:
    """The cuts of the least price plus scale times the squared weights of the parts."""
    count = len(price) - 1
    least, before = np.zeros(count + 1), [0] * (count + 1)
    for end in range(1, count + 1):
        cost = least[:end] + (weight[end] - weight[:end]) ** 2 * scale
        before[end] = int(np.argmin(cost))
        least[end] = cost[before[end]] + price[end]
    cuts: list[int] = []
    while before[count]:
        count = before[count]
        cuts.append(count)
    return cuts[::-1]
