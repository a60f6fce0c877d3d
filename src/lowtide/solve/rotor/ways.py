"""The ways to keep a block of a graph: which values its backward will find, and what that takes.

Problem: the dynamic programme of `table` wants a few options per block: bytes saved, seconds and temporaries
of its forward and of its backward. A captured graph has ops.

Method: in the manner of Zhao, Le Hellard, Eyraud-Dubois, Gusak, Beaumont, "Rockmate" (2023), with a greedy
choice in place of their integer programme. Of the values that the block's backward reads one after the
other is dropped, the least seconds per byte first, where a dropped value is recomputed from what crosses
into the block and from what is still kept. A few of these sets become ways. In the backward a dropped value
is computed right before its first reader. Sizes and temporaries are measured by replaying the runs.

Complexity: O(ways · ops of the block), and at worst O(values² · ops) for the choice, which is rarely seen.

Limits: inside a block nothing runs more than twice. What a pinned op wrote is taken to wait in memory.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from math import fsum

from ...plans.graph import Op
from ...plans.patience import check_time
from ..chain_stages import Stages
from .chain import Option

__all__ = ["Block", "Places", "Way"]


@dataclass(frozen=True, slots=True)
class Way:
    """An option and the runs that realise it, as places among the ops of the block."""

    option: Option
    forward: tuple[int, ...]
    backward: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a run takes: bytes at work, its writes with their bytes, and the droppable values that it uses."""

    work: int
    writes: tuple[tuple[str, int], ...]
    touches: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Back:
    """The backward of a block for some kept values: its runs, their seconds and their most bytes."""

    runs: list[str]
    seconds: float
    most: int


class Places:
    """Where the droppable values of a graph are used, by stages.

    `size` has their bytes, `written` the stage whose forward writes a value, `span` the first and the last
    cut that it crosses (cut i is before stage i), `last_read` the last stage whose backward reads it.
    """

    def __init__(self, stages: Stages) -> None:
        self.stages, self.graph = stages, stages.graph
        op = self.graph.op
        self.size = {value.name: value.bytes for value in self.graph.values if value.droppable}
        self.written: dict[str, int] = {}
        self.span: dict[str, tuple[int, int]] = {}
        for index, names in enumerate(stages.forward):
            for name in names:
                for value in op[name].reads:
                    if self.written.get(value, index) < index:
                        self.span[value] = (self.written[value] + 1, index)
                self.written.update((value, index) for value in op[name].writes if value in self.size)
        self.last_read: dict[str, int] = {}
        for index in range(len(stages) - 1, -1, -1):
            for name in stages.backward[index]:
                self.last_read.update((value, index) for value in op[name].reads)

    def bytes(self, values: Iterable[str]) -> int:
        """The bytes of some droppable values."""
        return sum(self.size[value] for value in values)

    def seconds(self, runs: Iterable[str]) -> float:
        """The seconds of some runs, the same in whatever order they come."""
        return fsum(self.graph.op[name].seconds for name in runs)

    def peak(self, runs: Iterable[str], start: int, there: set[str], stays: set[str]) -> int:
        """The most bytes of some runs: `start` of them first, `there` among these, `stays` never dropped."""
        traffic = [self.traffic[name] for name in runs]
        last = {value: index for index, run in enumerate(traffic) for value in run.touches}
        now = most = start
        for index, run in enumerate(traffic):
            # Everything that a run writes counts beside what is there, also what is there already: it writes
            # beside it.
            most = max(most, now + run.work)
            for value, size in run.writes:
                if value not in there:
                    now += size
                    there.add(value)
            for value in run.touches:
                if last[value] == index and value in there and value not in stays:
                    now -= self.size[value]
                    there.remove(value)
        return most

    @cached_property
    def traffic(self) -> dict[str, Traffic]:
        """What each op does to memory."""
        return {op.name: self._traffic(op) for op in self.graph.ops}

    def _traffic(self, op: Op) -> Traffic:
        writes = tuple((name, self.graph.value[name].bytes) for name in op.writes)
        touches = (name for name in dict.fromkeys((*op.reads, *op.writes)) if name in self.size)
        return Traffic(sum(size for _, size in writes) + op.workspace, writes, tuple(touches))


class Block:
    """The stages from `first` to `last` as one: its ops, what leaves it, and what its backward reads of it.

    `gradient` is the number of bytes that the backward of the later stages hands to this one.
    """

    def __init__(self, places: Places, first: int, last: int, gradient: int) -> None:
        self.places, self.first, self.last, self.gradient = places, first, last, gradient
        stages, op = places.stages, places.graph.op
        self.forward = [name for index in range(first, last + 1) for name in stages.forward[index]]
        self.backward = [name for index in range(last, first - 1, -1) for name in stages.backward[index]]
        self.ops = [*self.forward, *self.backward]
        written = {value for name in self.forward for value in op[name].writes if value in places.size}
        self.leaving = {value for value in written if places.span.get(value, (0, 0))[1] > last}
        self.read = {value for name in self.backward for value in op[name].reads if value in written}
        self.at_end = last + 1 == len(stages)

    @cached_property
    def writer(self) -> dict[str, Op]:
        """The op that may recompute each value of the block."""
        ops = [self.places.graph.op[name] for name in self.forward]
        return {v: op for op in ops if op.kind != "pinned" for v in op.writes if v in self.places.size}

    @cached_property
    def kept_on(self) -> set[str]:
        """The values that the block's backward touches and that earlier stages' backwards read too."""
        op, last_read = self.places.graph.op, self.places.last_read
        touched = {value for name in self.backward for value in (*op[name].reads, *op[name].writes)}
        return {value for value in touched if last_read.get(value, self.first) < self.first}

    @cached_property
    def handed(self) -> set[str]:
        """The droppable values that the block's backward reads and that later stages' backwards wrote."""
        op, places = self.places.graph.op, self.places
        read = {value for name in self.backward for value in op[name].reads if value in places.size}
        own = {value for name in self.backward for value in op[name].writes}
        return {value for value in read - own if value not in places.written}

    def key(self) -> object:
        """Equal for blocks that have the same ways."""
        graph, places = self.places.graph, self.places
        number: dict[str, int] = {}
        # Names replaced by numbers in the order of first use: layers that differ only in names get one key.
        parts: list[object] = [self.last - self.first, self.at_end, len(self.forward), self.gradient]
        for name in self.ops:
            op = graph.op[name]
            parts.append((op.seconds, op.workspace, op.kind, len(op.reads)))
            for value in (*op.reads, *op.writes):
                if value in number:
                    parts.append(number[value])
                else:
                    number[value] = len(number)
                    role = value in places.size, value in self.leaving, value in places.written
                    parts.append((graph.value[value].bytes, *role, value in self.kept_on))
        return tuple(parts)

    def ways(self, count: int) -> list[Way]:
        """Some ways from keeping all that the backward reads to keeping only what crosses.

        But for the last block, which runs forward once and all of it, each comes in two forms: the
        one that writes what leaves the block and the one that does not have to.
        """
        ways: list[Way] = []
        for kept in self._chosen(count):
            back = self._measured(kept)
            if self.at_end:
                ways.append(self._way(kept, self.forward, back, closes=False))
            else:
                stays = kept | self.leaving
                ways.append(self._way(stays, self.needed(stays), back, closes=False))
                ways.append(self._way(kept, self.needed(kept), back, closes=True))
        return ways

    def needed(self, values: set[str]) -> list[str]:
        """The forward ops of the block that some of its values need, in order."""
        runs = self._closure(values, set(), set())
        return [name for name in self.forward if name in runs]

    def _way(self, stays: set[str], forward: list[str], back: Back, *, closes: bool) -> Way:
        places = self.places
        saved = places.bytes(stays)
        option = Option(
            saved,
            places.seconds(forward),
            back.seconds,
            forward_temp=places.peak(forward, 0, set(), stays) - saved,
            backward_temp=back.most - self.gradient - saved,
            stages=self.last - self.first + 1,
            closes=closes,
        )
        return Way(option, tuple(self.number[n] for n in forward), tuple(self.number[n] for n in back.runs))

    @cached_property
    def number(self) -> dict[str, int]:
        """The place of each op among those of the block."""
        return {name: index for index, name in enumerate(self.ops)}

    def _measured(self, kept: set[str]) -> Back:
        places, runs = self.places, self._back(kept)
        start = places.bytes(kept) + self.gradient
        most = places.peak(runs, start, kept | self.handed, self.kept_on)
        return Back(runs, places.seconds(runs), most)

    def _drops(self) -> Iterator[tuple[str, float]]:
        """What to drop, the least seconds per byte first, and the seconds that each drop adds."""
        kept, again = {v for v in self.read if v in self.writer and v not in self.leaving}, set[str]()
        heap = [(self._price(value, kept, again)[0], value) for value in sorted(kept)]
        heapq.heapify(heap)
        while heap:
            check_time()
            _, value = heapq.heappop(heap)
            if value not in kept:
                continue
            price, runs = self._price(value, kept, again)
            # Lazily: the price is that of when it was pushed. If it has risen since, it waits for its turn.
            if heap and price > heap[0][0]:
                heapq.heappush(heap, (price, value))
                continue
            kept.remove(value)
            again |= runs
            for name in runs:
                # What these runs write besides is to be had for nothing from now on.
                for other in kept.intersection(self.places.graph.op[name].writes):
                    heapq.heappush(heap, (0.0, other))
            yield value, self.places.seconds(runs)

    def _price(self, value: str, kept: set[str], again: set[str]) -> tuple[float, set[str]]:
        """The seconds per byte of recomputing a value instead of keeping it, and the runs it takes."""
        runs = self._closure([value], kept, again)
        return self.places.seconds(runs) / max(self.places.size[value], 1), runs

    def _closure(self, values: Iterable[str], there: set[str], again: set[str]) -> set[str]:
        """The ops, besides those in `again`, that it takes to write some values from what is there."""
        runs: set[str] = set()
        todo = list(values)
        while todo:
            op = self.writer.get(todo.pop())
            if op is not None and op.name not in runs and op.name not in again:
                runs.add(op.name)
                todo += [value for value in op.reads if value not in there]
        return runs

    def _back(self, kept: set[str]) -> list[str]:
        """The backward with each dropped value recomputed right before its first reader."""
        op, there = self.places.graph.op, set(kept)
        runs: list[str] = []
        for name in self.backward:
            check_time()  # a long block takes the square of its ops
            missing = [value for value in op[name].reads if value in self.writer and value not in there]
            if missing:
                again = self._closure(missing, there, set())
                runs += [other for other in self.forward if other in again]
                there.update(value for other in again for value in op[other].writes)
            runs.append(name)
        return runs

    def _chosen(self, count: int) -> list[set[str]]:
        """At most `count` of the sets of kept values, the first and the last among them.

        Half of them are the knees of the curve of seconds over bytes, found by Ramer, Douglas and Peucker's
        rule; the others are evenly spread over the bytes.
        """
        drops = list(self._drops())
        sizes = list(
            accumulate((-self.places.size[v] for v, _ in drops), initial=self.places.bytes(self.read))
        )
        seconds = list(accumulate((added for _, added in drops), initial=0.0))
        chosen = {0, len(drops)}
        while len(chosen) < min(count // 2, len(sizes)):
            chosen.add(_farthest(sizes, seconds, sorted(chosen)))
        parts = count - len(chosen)
        for part in range(1, parts):
            goal = sizes[0] + (sizes[-1] - sizes[0]) * part / parts
            chosen.add(min(range(len(sizes)), key=lambda i: (abs(sizes[i] - goal), i)))
        return [self.read - {value for value, _ in drops[:index]} for index in sorted(chosen)]


def _farthest(sizes: Sequence[int], seconds: Sequence[float], chosen: Sequence[int]) -> int:
    """The point of the curve that is farthest from the straight lines between the chosen points."""
    far: list[tuple[float, int]] = []
    for low, high in pairwise(chosen):
        slope = (seconds[high] - seconds[low]) / ((sizes[high] - sizes[low]) or 1)
        for index in range(low + 1, high):
            line = seconds[low] + slope * (sizes[index] - sizes[low])
            far.append((abs(line - seconds[index]), -index))
    return -max(far)[1]
