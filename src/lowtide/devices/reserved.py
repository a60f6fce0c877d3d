"""What a training loop makes the CUDA allocator reserve, by replay of each of its requests.

Memory that is reserved ends a run: segments with holes that no request fits. The events of a step are served
by `CachingAllocator` from the segments that are in use now (those that are wholly free are given back before
a plan's first step); what the graph says is there before a step and no segment holds (all of it, for a device
that is absent) is asked for first, parameter by parameter. Then room is set aside for the state that an
optimizer is to make, and the arena comes, where there is to be one: a segment that is reserved at once, and
free. Then steps follow as in a loop: forward, backward; after the first one, the state of the optimizer, in
the room for it, or in the backward itself, in any hole, where the optimizer steps there; gradients and what
the step returned go before the next forward. Later steps find other holes than the first, so the loop goes on
until a step finds those of an earlier one. A loop may train on one batch or bring a new one for each step,
which is there before the last one goes: both are replayed, and the larger peaks count.

Not in it, as no plan knows of it: what `optimizer.step()` makes for a while, what kernels make besides their
workspaces, the loss outside of the step beyond its bytes, other streams. O(events) for each step.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..plans.events import COPY, GIVEN, VALUE, Allocate, Event, Free, Ran
from ..plans.graph import GIVEN_KINDS, Graph
from .allocator_settings import MIB, AllocatorSettings
from .aside import Aside
from .blocks import Block
from .caching_allocator import CachingAllocator, Segment

__all__ = ["Loop", "LoopPeaks", "StepRequests", "coming_state"]

OPTIMIZER = "optimizer"
"""The band of optimizer state, which the first step leaves to be made."""
_STEPS = 12
"""Steps after which a loop is left that has not come back to where it was; chosen, most do after three."""

_TENSORS = 4
"""Tensors of a parameter's size that an optimizer may keep for it: three are the most in torch's own. What is
above that belongs to parameters of other steps."""


@dataclass(frozen=True)
class LoopPeaks:
    """Bytes allocated and reserved at most: in the first step, and in all."""

    first_allocated: int
    first_reserved: int
    allocated: int
    reserved: int

    def with_those(self, other: LoopPeaks) -> LoopPeaks:
        """The larger of each."""
        return LoopPeaks(
            max(self.first_allocated, other.first_allocated),
            max(self.first_reserved, other.first_reserved),
            max(self.allocated, other.allocated),
            max(self.reserved, other.reserved),
        )


class Loop:
    """A training loop over a step, from the segments that are there now.

    `story` are the events of the step: those of a schedule, or of the code that a compiler made of it.
    """

    def __init__(
        self,
        graph: Graph,
        story: Iterable[Event],
        *,
        segments: Iterable[Segment] = (),
        settings: AllocatorSettings | None = None,
    ) -> None:
        self.graph, self.story = graph, list(story)
        self.segments, self.settings = tuple(segments), settings
        self.batch = [value.bytes for value in graph.values if value.kind == "input" and value.bytes]

    @cached_property
    def before(self) -> int:
        """The bytes that are reserved when the first step begins, without an arena."""
        return _Run(self, renews=False).allocator.reserved

    def peaks(self, *, arena: int = 0, limit: int | None = None) -> LoopPeaks:
        """The peaks with an arena; `NoRoomError` where the loop needs more than `limit`."""
        found = self.peaks_below(sys.maxsize, arena=arena, limit=limit)
        assert found is not None
        return found

    def peaks_below(self, most: int, *, arena: int = 0, limit: int | None = None) -> LoopPeaks | None:
        """The peaks with an arena, where the loop reserves no more than that."""
        same = _Run(self, renews=False, limit=limit).peaks_below(most, arena)
        if same is None or max(self.batch, default=0) <= MIB:  # small ones share segments of their own
            return same
        renewed = _Run(self, renews=True, limit=limit).peaks_below(most, arena)
        return None if renewed is None else same.with_those(renewed)


class _Run:
    """One replay of a loop; with `renews` each step has a batch of its own."""

    def __init__(self, loop: Loop, *, renews: bool, limit: int | None = None) -> None:
        self.loop, self.renews = loop, renews
        self.allocator = CachingAllocator(loop.segments, loop.settings, limit=limit)
        self.allocator.give_back()
        self.batch: list[Block] = []
        self.state = self.before()

    def before(self) -> list[int]:
        """Ask for what no segment holds before the first step; the sizes of the state that comes after it."""
        graph, allocator = self.loop.graph, self.allocator
        if allocator.allocated:
            found = map(allocator.holding, self.loop.batch)
            self.batch = [block for block in found if block is not None]
            return coming_state(graph, allocator.allocated)
        self.make(
            value.bytes for value in graph.values if value.kind in GIVEN_KINDS and value.kind != "input"
        )
        self.batch = self.make(self.loop.batch)
        self.make(size for name, size in graph.fixed.items() if name not in (OPTIMIZER, "allocator"))
        return _state_blocks(graph, graph.fixed.get(OPTIMIZER, 0))

    def make(self, sizes: Iterable[int]) -> list[Block]:
        return [self.allocator.allocate(size) for size in sizes if size]

    def renew(self) -> None:
        """The caller brings another batch, and lets go of the last."""
        new = self.make(self.loop.batch)
        for block in self.batch:
            self.allocator.release(block)
        self.batch = new

    def peaks_below(self, most: int, arena: int) -> LoopPeaks | None:
        """The peaks of steps one after the other, where none reserves more than that."""
        allocator = self.allocator
        within = _by_update(self.loop.graph, self.state)
        aside = None if within else Aside.of(allocator, self.state)
        if arena:
            allocator.release(allocator.allocate(arena))
        step = StepRequests(self.loop.graph, allocator)
        peaks: list[tuple[int, int]] = []
        seen: set[object] = set()
        for number in range(_STEPS):
            if number and self.renews:
                self.renew()
            step.clear()
            if (now := (allocator.allocated, allocator.all_holes())) in seen:
                break  # from here on the loop does what it did before
            seen.add(now)
            allocator.begin()
            for event in self.loop.story:
                if number == 0 and isinstance(event, Ran):
                    self.make(within.pop(event.op, ()))
                step.enter(event)
                if allocator.reserved > most:
                    return None
            peaks.append((allocator.allocated_peak, allocator.reserved_peak))
            if number == 0:
                for sizes in within.values():  # of updates that the story does not tell of
                    self.make(sizes)
                if aside is not None:
                    aside.fill(allocator)
        return LoopPeaks(*peaks[0], *(max(each) for each in zip(*peaks, strict=True)))


def coming_state(graph: Graph, allocated: int) -> list[int]:
    """The requests for optimizer state that is still to be made, where so much is allocated now."""
    there = graph.given_bytes + graph.fixed_bytes - graph.fixed.get("allocator", 0)
    coming = min(there - allocated, graph.fixed.get(OPTIMIZER, 0))
    return _state_blocks(graph, max(coming, 0))


def _state_blocks(graph: Graph, state: int) -> list[int]:
    """The state of an optimizer as blocks: as many of each trained size as there are, and the rest."""
    each = _for_each(graph, state)
    blocks = [size for size in _trained(graph) for _ in range(each)]
    return [*blocks, state - sum(blocks)]


def _for_each(graph: Graph, state: int) -> int:
    """How many tensors of its size an optimizer keeps for each parameter."""
    whole = sum(_trained(graph))
    return min(state // whole, _TENSORS) if whole else 0


def _trained(graph: Graph) -> list[int]:
    """The bytes of each parameter: of its gradient, or its own where no gradient leaves the backward."""
    left = [value.bytes for value in graph.values if value.kind == "gradient"]
    return left + [graph.value[name].bytes for _, name in _updates(graph)]


def _updates(graph: Graph) -> list[tuple[str, str]]:
    """The parameters that an optimizer updates inside of the backward, each after the op that does so."""
    return [(op.name, name) for op in graph.ops if op.phase == "backward" for name in op.updates]


def _by_update(graph: Graph, state: Sequence[int]) -> dict[str, list[int]]:
    """The blocks of state by the update that makes them, where the optimizer steps inside of the backward."""
    each, found = _for_each(graph, sum(state)), dict[str, list[int]]()
    for op, name in _updates(graph):
        found.setdefault(op, []).extend([graph.value[name].bytes] * each)
    for first in list(found)[:1]:
        rest = Counter(state) - Counter(size for sizes in found.values() for size in sizes)
        found[first].extend(rest.elements())
    return found


class StepRequests:
    """The blocks of a step's values; what it gives its caller stays until the next one begins."""

    def __init__(self, graph: Graph, allocator: CachingAllocator) -> None:
        self.graph, self.allocator = graph, allocator
        self.blocks: dict[tuple[str, str], Block] = {}

    def clear(self) -> None:
        """The caller lets go of gradients and outputs."""
        for block in self.blocks.values():
            self.allocator.release(block)
        self.blocks = {}

    def enter(self, event: Event) -> None:
        if isinstance(event, Allocate):
            self.request(event)
        elif isinstance(event, Free):
            block = self.blocks.pop((event.what, event.name), None)
            if block is not None:
                self.allocator.release(block)
        elif isinstance(event, Ran):
            self.for_a_while(event.workspace)
        else:
            self.for_a_while(event.bytes)

    def request(self, event: Allocate) -> None:
        """A block for what is written, or that of the value that it is written over."""
        if event.in_place_of is not None:
            if event.what == VALUE and (VALUE, event.in_place_of) in self.blocks:
                self.blocks[VALUE, event.name] = self.blocks.pop((VALUE, event.in_place_of))
        elif event.bytes and (event.what in (VALUE, COPY) or self.is_tangent(event)):
            what = COPY if event.what == COPY else VALUE
            self.blocks[what, event.name] = self.allocator.allocate(event.bytes)

    def is_tangent(self, event: Allocate) -> bool:
        """What is given at the boundary is made then; what is given before the step is there."""
        return event.what == GIVEN and self.graph.value[event.name].kind == "tangent"

    def for_a_while(self, size: int) -> None:
        if size:
            self.allocator.release(self.allocator.allocate(size))
