"""How a device's allocator counts bytes.

On the CPU a storage is as large as it says. The CUDA caching allocator rounds a request up to 512 bytes and
serves it from the smallest free block that holds it; where the rest of the block is no more than 1 MiB it is
not split off but booked with the request. So what the allocator reports is a little more than what was asked
for, and how much depends on the order of requests: `allocator_overhead` replays a schedule through the same
rules, starting from the blocks that are free now, twice, because the second step starts from what the first
left. A write in the place of a value requests nothing: it gets that value's block.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from ..plans.graph import GIVEN_KINDS, Graph, Op
from ..plans.schedule import Run, Schedule
from ..plans.simulator import in_place

__all__ = ["allocator_overhead", "free_blocks", "rounded"]

_BLOCK = 512
_MIB = 2**20
_SHARED_SEGMENT = 20 * _MIB
_OWN_SEGMENT = 10 * _MIB


def rounded(size: int, device: torch.device) -> int:
    """The bytes that the allocator of a device rounds a request to."""
    return _up(size, _BLOCK) if device.type == "cuda" else size


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


def free_blocks(device: torch.device) -> list[int]:
    """Sizes of the blocks over 1 MiB that the CUDA allocator holds free now."""
    segments = torch.cuda.memory_snapshot()
    return [
        block["size"]
        for segment in segments
        if segment["segment_type"] == "large" and segment["device"] == (device.index or 0)
        for block in segment["blocks"]
        if block["state"] == "inactive"
    ]


def allocator_overhead(graph: Graph, schedule: Schedule, free: Iterable[int]) -> int:
    """How far the booked peak of a schedule lies above the sum of its values' bytes."""
    pool = _Pool(free)
    first = _replay(graph, schedule, pool)
    return max(first, _replay(graph, schedule, pool))


@dataclass(eq=False)
class _Piece:
    """A stretch of a segment, free or booked, and its neighbours."""

    size: int
    free: bool = True
    before: _Piece | None = None
    behind: _Piece | None = None


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

    def book(self, size: int) -> _Piece:
        place = bisect_left(self.free, (size, -1))
        if place < len(self.free):
            _, key = self.free.pop(place)
            piece = self.pieces.pop(key)
        else:
            piece = _Piece(_SHARED_SEGMENT if size < _OWN_SEGMENT else _up(size, 2 * _MIB))
        piece.free = False
        if piece.size - size > _MIB:
            rest = _Piece(piece.size - size, False, piece, piece.behind)
            if piece.behind is not None:
                piece.behind.before = rest
            piece.behind, piece.size = rest, size
            self.release(rest)
        return piece

    def release(self, piece: _Piece) -> None:
        for other in (piece.before, piece.behind):
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
    if other is piece.before:
        piece.before = other.before
        if other.before is not None:
            other.before.behind = piece
    else:
        piece.behind = other.behind
        if other.behind is not None:
            other.behind.before = piece
    piece.size += other.size
    return piece


def _replay(graph: Graph, schedule: Schedule, pool: _Pool) -> int:
    """The booked peak above the peak of the plain sum; everything is released again."""
    step = _Step(graph, pool)
    taken = in_place(graph, schedule)
    for index, action in enumerate(schedule.steps):
        if index == len(schedule.forward):
            step.plain += sum(value.bytes for value in graph.values if value.kind == "tangent")
        if isinstance(action, Run):
            step.run(graph.op[action.op], taken.get(index))
        else:
            step.drop(action.value)
    for piece in step.booked.values():
        pool.release(piece)
    return step.booked_peak - step.plain_peak


class _Step:
    """A step on the allocator: the plain sum of bytes, and what is booked above it."""

    def __init__(self, graph: Graph, pool: _Pool) -> None:
        self.size = {value.name: value.bytes for value in graph.values}
        self.there = {value.name for value in graph.values if value.kind in GIVEN_KINDS}
        self.pool = pool
        self.booked: dict[str, _Piece] = {}
        self.taken: str | None = None
        self.plain = self.excess = self.plain_peak = self.booked_peak = 0

    def run(self, op: Op, taken: str | None) -> None:
        asked = op.writes if taken is None else ()
        requests = [*((name, self.size[name]) for name in asked), ("", op.workspace)]
        made = [(name, size, self.pool.book(size)) for name, size in requests if size > _MIB]
        total = self.plain + sum(size for _, size in requests)
        over = self.excess + sum(piece.size - size for _, size, piece in made)
        self.plain_peak = max(self.plain_peak, total)
        self.booked_peak = max(self.booked_peak, total + over)
        for name, size, piece in reversed(made):
            if not name or name in self.there:
                self.pool.release(piece)
            else:
                self.booked[name] = piece
                self.excess += piece.size - size
        fresh = [name for name in op.writes if name not in self.there]
        self.plain += sum(self.size[name] for name in fresh)
        self.there.update(fresh)
        self.hand_over(taken, fresh)

    def hand_over(self, taken: str | None, fresh: list[str]) -> None:
        """Let what was written in the place of a value have its bytes and its block."""
        self.taken = taken
        if taken is not None:
            self.plain -= self.size[taken]
            if fresh and taken in self.booked:
                self.booked[fresh[0]] = self.booked.pop(taken)

    def drop(self, name: str) -> None:
        self.there.discard(name)
        if name != self.taken:
            self.plain -= self.size[name]
        if name in self.booked:
            piece = self.booked.pop(name)
            self.excess -= piece.size - self.size[name]
            self.pool.release(piece)
