"""What a training loop makes the CUDA allocator reserve, by replay of each of its requests.

`plan.peak` is what is allocated. Memory that is reserved ends a run: segments with holes that no request
fits. The stream of a schedule's events is served by `CachingAllocator` from the segments that are there
now; what the graph says is there before a step and no segment holds (all of it, for a device that is
absent) is asked for first, parameter by parameter. Then steps follow as in a loop: forward, backward; after
the first one, the state that an optimizer is to make; the gradients and what the step returned go before
the next forward. Later steps find other holes than the first, so the loop goes on until a step reserves no
more, four times at most.

Not in it, as no plan knows of it: what `optimizer.step()` makes for a while, what kernels make besides their
workspaces, the loss outside of the step beyond its bytes, other streams. O(events) for each step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..plans.events import COPY, GIVEN, VALUE, Allocate, Event, Free, Ran, events
from ..plans.graph import GIVEN_KINDS, Graph
from ..plans.schedule import Schedule
from .allocator_settings import AllocatorSettings
from .blocks import Block
from .caching_allocator import CachingAllocator, Segment

__all__ = ["LoopPeaks", "StepRequests", "loop_peaks"]

OPTIMIZER = "optimizer"
"""The band of optimizer state, which the first step leaves to be made."""
_STEPS = 4

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


def loop_peaks(
    graph: Graph,
    schedule: Schedule,
    *,
    segments: Iterable[Segment] = (),
    settings: AllocatorSettings | None = None,
    limit: int | None = None,
) -> LoopPeaks:
    """The peaks of a loop over a schedule; `NoRoomError` where it needs more than `limit`."""
    allocator = CachingAllocator(segments, settings, limit=limit)
    coming = _before(graph, allocator)
    story = list(events(graph, schedule))
    step = StepRequests(graph, allocator)
    peaks = []
    for number in range(_STEPS):
        before = allocator.reserved
        step.clear()
        allocator.begin()
        for event in story:
            step.enter(event)
        peaks.append((allocator.allocated_peak, allocator.reserved_peak))
        if number == 0:
            _make(coming, allocator)
        elif allocator.reserved_peak == before:
            break
    return LoopPeaks(*peaks[0], max(peak for peak, _ in peaks), max(peak for _, peak in peaks))


def _before(graph: Graph, allocator: CachingAllocator) -> list[int]:
    """Ask for what no segment holds before the first step; the sizes of what comes after it."""
    state = graph.fixed.get(OPTIMIZER, 0)
    if allocator.allocated:
        coming = graph.given_bytes + graph.fixed_bytes - graph.fixed.get("allocator", 0) - allocator.allocated
        return _state_blocks(graph, max(min(coming, state), 0))
    for value in graph.values:
        if value.kind in GIVEN_KINDS:
            _make([value.bytes], allocator)
    _make([size for name, size in graph.fixed.items() if name not in (OPTIMIZER, "allocator")], allocator)
    return _state_blocks(graph, state)


def _state_blocks(graph: Graph, state: int) -> list[int]:
    """The state of an optimizer as blocks: as many of each gradient's size as there are, and the rest."""
    sizes = [value.bytes for value in graph.values if value.kind == "gradient"]
    whole = sum(sizes)
    each = min(state // whole, _TENSORS) if whole else 0
    return [size for size in sizes for _ in range(each)] + [state - each * whole]


def _make(sizes: Iterable[int], allocator: CachingAllocator) -> None:
    for size in sizes:
        if size:
            allocator.allocate(size)


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
