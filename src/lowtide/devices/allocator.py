"""How a device's allocator counts bytes.

On the CPU a storage is as large as it says. The CUDA caching allocator rounds a request up to 512 bytes and
serves it from the smallest free block that holds it; where the rest of the block is no more than 1 MiB it is
not split off but allocated with the request. So what the allocator reports is a little more than what was
asked for, and how much depends on the order of requests: `allocator_overhead` serves the stream of a
schedule's events by the same rules, starting from the blocks that are free now, twice, because the second
step starts from what the first left. A write in the place of a value requests nothing: it gets that value's
block.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..plans.events import COPY, STATE, VALUE, Allocate, Event, Free, Ran, events
from ..plans.graph import Graph
from ..plans.schedule import Schedule

if TYPE_CHECKING:
    import torch  # a schedule is replayed without it

__all__ = ["allocator_overhead", "rounded"]

_BLOCK = 512
_MIB = 2**20
_SHARED_SEGMENT = 20 * _MIB
_OWN_SEGMENT = 10 * _MIB


def rounded(size: int, device: torch.device) -> int:
    """The bytes that the allocator of a device rounds a request to."""
    return _up(size, _BLOCK) if device.type == "cuda" else size


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


def allocator_overhead(graph: Graph, schedule: Schedule, free: Iterable[int]) -> int:
    """How far the allocated peak of a schedule lies above the sum of its values' bytes."""
    pool, story = _Pool(free), list(events(graph, schedule))
    first = _replay(story, pool)
    return max(first, _replay(story, pool))


@dataclass(eq=False)
class _Piece:
    """A stretch of a segment, free or allocated, and its neighbours."""

    size: int
    free: bool = True
    previous: _Piece | None = None
    next: _Piece | None = None


@dataclass
class _Pool:
    """The large pool: free pieces by size, the best fit first."""

    sizes: Iterable[int]
    free: list[tuple[int, int]] = field(default_factory=list)
    pieces: dict[int, _Piece] = field(default_factory=dict)
    count: int = 0

    def __post_init__(self) -> None:
        for size in self.sizes:
            self.release(_Piece(size, free=False))

    def allocate(self, size: int) -> _Piece:
        place = bisect_left(self.free, (size, -1))
        if place < len(self.free):
            _, key = self.free.pop(place)
            piece = self.pieces.pop(key)
        else:
            piece = _Piece(_SHARED_SEGMENT if size < _OWN_SEGMENT else _up(size, 2 * _MIB))
        piece.free = False
        if piece.size - size > _MIB:
            rest = _Piece(piece.size - size, False, piece, piece.next)
            if piece.next is not None:
                piece.next.previous = rest
            piece.next, piece.size = rest, size
            self.release(rest)
        return piece

    def release(self, piece: _Piece) -> None:
        for other in (piece.previous, piece.next):
            if other is not None and other.free:
                self.unlist(other)
                piece = _merged(piece, other)
        piece.free = True
        self.count += 1
        self.pieces[self.count] = piece
        insort(self.free, (piece.size, self.count))

    def unlist(self, piece: _Piece) -> None:
        start = bisect_left(self.free, (piece.size, -1))
        for place in range(start, len(self.free)):
            if self.pieces[self.free[place][1]] is piece:
                del self.pieces[self.free.pop(place)[1]]
                return


def _merged(piece: _Piece, other: _Piece) -> _Piece:
    """The piece grown over its free neighbour."""
    if other is piece.previous:
        piece.previous = other.previous
        if other.previous is not None:
            other.previous.next = piece
    else:
        piece.next = other.next
        if other.next is not None:
            other.next.previous = piece
    piece.size += other.size
    return piece


def _replay(story: Iterable[Event], pool: _Pool) -> int:
    """The allocated peak above the peak of the plain sum; everything is released again."""
    step = _Step(pool)
    for event in story:
        step.enter(event)
    for piece, _ in step.allocated.values():  # in any order: what is left is whole segments
        pool.release(piece)
    return step.allocated_peak - step.plain_peak


class _Step:
    """A step on the allocator: the plain sum of bytes, and what is allocated above it.

    `allocated` are the pieces of values and copies, with the bytes that were asked for.
    """

    def __init__(self, pool: _Pool) -> None:
        self.pool = pool
        self.allocated: dict[tuple[str, str], tuple[_Piece, int]] = {}
        self.plain = self.excess = self.plain_peak = self.allocated_peak = 0

    def enter(self, event: Event) -> None:
        if isinstance(event, Allocate):
            if event.what != STATE:  # a GPU's random state is kept on the host
                self.plain += event.bytes
            self.request(event)
        elif isinstance(event, Free):
            if event.what != STATE:
                self.plain -= event.bytes
            self.release(event)
        elif isinstance(event, Ran):
            self.run(event.workspace)

    def request(self, event: Allocate) -> None:
        """A piece for what is written; what is given is there before the step and gets none."""
        if event.in_place_of is not None:
            taken = VALUE, event.in_place_of
            if event.what == VALUE and taken in self.allocated:
                self.allocated[VALUE, event.name] = self.allocated.pop(taken)
        elif event.what in (VALUE, COPY) and event.bytes > _MIB:
            piece = self.pool.allocate(event.bytes)
            self.allocated[event.what, event.name] = piece, event.bytes
            self.excess += piece.size - event.bytes

    def run(self, workspace: int) -> None:
        """The sums while an op runs; its workspace is requested last and released first."""
        total, excess = self.plain + workspace, self.excess
        if workspace > _MIB:
            piece = self.pool.allocate(workspace)
            excess += piece.size - workspace
            self.pool.release(piece)
        self.plain_peak = max(self.plain_peak, total)
        self.allocated_peak = max(self.allocated_peak, total + excess)

    def release(self, event: Free) -> None:
        found = self.allocated.pop((event.what, event.name), None)
        if found is not None:
            piece, asked = found
            self.excess -= piece.size - asked
            self.pool.release(piece)
