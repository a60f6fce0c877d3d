"""torch's CUDA caching allocator on paper: the block of each request, and what is reserved of the device.

The rules, as torch's notes on CUDA semantics have them ("Memory management") and torch 2.11 to 2.13 behave:

- a request is rounded up to 512 bytes (or as `roundup_power2_divisions` says); up to 1 MiB it is served from
  the small pool, else from the large one;
- it gets the smallest free block that holds it, of equal ones that with the lowest address. What is left over
  becomes a free block of its own if it has 512 bytes in the small pool, more than 1 MiB in the large one;
- where no block fits, a segment is asked of the device: 2 MiB for small requests, 20 MiB for those below
  10 MiB, else the request rounded up to 2 MiB;
- a block that is released merges with free neighbours of its segment. The segment stays reserved;
- where the device has no more to give, all segments that are wholly free go back, and the request is tried
  again;
- with `expandable_segments` each pool has one segment that grows by pages (2 MiB, in the large pool 20 MiB)
  as requests need, and whatever is left over of a block is free. A free block at the growing end counts as if
  it had grown, so that the others are filled first. Where the device has no more, free pages go back;
- blocks of `max_split_size_mb` and more are not split; they serve large requests alone.

Not in it: streams (all is on one), private pools, `garbage_collection_threshold`. Addresses of new segments
are taken to rise, which decides between equal blocks alone. A request takes O(log blocks) and the shift of a
list.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass

from .allocator_settings import MIB, AllocatorSettings
from .blocks import Block, Pool, first_of, free_span, join

__all__ = ["CachingAllocator", "NoRoomError", "Segment"]

_ENDLESS = 1 << 50
"""Addresses that an expandable segment may grow to: more than any device has."""


class NoRoomError(Exception):
    """A request that cannot be served below the limit."""


@dataclass(frozen=True)
class Segment:
    """A stretch of the device that the allocator holds: its blocks in order, as (bytes, free)."""

    address: int
    blocks: tuple[tuple[int, bool], ...]
    small: bool = False
    expandable: bool = False


class CachingAllocator:
    """The allocator of one device, from the segments that it holds; `limit` is what it may reserve."""

    def __init__(
        self,
        segments: Iterable[Segment] = (),
        settings: AllocatorSettings | None = None,
        *,
        limit: int | None = None,
    ) -> None:
        self.settings = settings or AllocatorSettings()
        self.limit = limit
        self.small = Pool(2 * MIB, 512)
        rest = 512 if self.settings.expandable else MIB + 1
        self.large = Pool(self.settings.shared_segment, rest)
        self.allocated = self.reserved = self.allocated_peak = self.reserved_peak = 0
        self.top = 0
        self.held: list[Block] = []
        for segment in segments:
            self._take_over(segment)
        self.begin()

    def begin(self) -> None:
        """Count peaks from now on."""
        self.allocated_peak, self.reserved_peak = self.allocated, self.reserved

    def allocate(self, size: int) -> Block:
        """A block of at least `size` bytes; `NoRoomError` where the limit is in the way."""
        size = self.settings.rounded(size)
        pool = self.small if size <= MIB else self.large
        block = self._cached(pool, size) or self._new(pool, size)
        if block is None and self._give_oversized(pool, size):
            block = self._new(pool, size)
        if block is None:
            self.give_back()
            block = self._new(pool, size)
        if block is None:
            raise NoRoomError(f"{size} bytes beside {self.reserved} reserved, of {self.limit}")
        if block.size - size >= pool.least_rest and (pool is self.small or self._splits(size)):
            pool.split(block, size)
        self.allocated += block.size
        self.allocated_peak = max(self.allocated_peak, self.allocated)
        return block

    def release(self, block: Block) -> None:
        """Put a block back; it stays reserved."""
        self.allocated -= block.size
        block.pool.put(block)

    def holding(self, size: int) -> Block | None:
        """A block that was in use from the start and may be that of a request of `size` bytes.

        Each is given once.
        """
        wanted = self.settings.rounded(size)
        fits = [block for block in self.held if wanted <= block.size <= wanted + MIB]
        if not fits:
            return None
        found = min(fits, key=lambda block: block.size)
        self.held.remove(found)
        return found

    def holes(self) -> tuple[tuple[int, int], ...]:
        """What is free in the large pool, by size and address."""
        return tuple((size, address) for size, address, _ in self.large.free)

    def all_holes(self) -> Hashable:
        """What decides where later requests go: all that is free, by size and address."""
        return self.holes(), tuple((size, address) for size, address, _ in self.small.free)

    def give_back(self) -> None:
        """Give back to the device what is wholly free: segments, and pages of expandable ones."""
        for pool in self.small, self.large:
            for _, _, block in list(pool.free):
                if block.expandable:
                    self._unmap(block)
                elif block.before is None and block.after is None:
                    self._drop(block)

    def _take_over(self, segment: Segment) -> None:
        pool, before, address = self.small if segment.small else self.large, None, segment.address
        for size, free in segment.blocks:
            block = Block(address, size, pool, segment.expandable)
            join(before, block)
            if free:
                pool.enlist(block)
            else:
                self.held.append(block)
                self.allocated += size
            self.reserved += size
            before, address = block, address + size
        if segment.expandable and before is not None:
            tail = Block(address, _ENDLESS, pool, True, mapped=False)
            join(before, tail)
            pool.enlist(tail)
            address += _ENDLESS
        self.top = max(self.top, address)

    def _splits(self, size: int) -> bool:
        most = self.settings.most_split
        return self.settings.expandable or most is None or size < most

    def _cached(self, pool: Pool, size: int) -> Block | None:
        """The best fit among free blocks."""
        place = bisect_left(pool.free, (size,))
        expandable, most = self.settings.expandable, self.settings.most_split
        while not expandable and place < len(pool.free) and pool.free[place][2].expandable:
            place += 1  # it was set off since: these blocks serve nobody
        if place == len(pool.free):
            return None
        block = pool.free[place][2]
        while expandable and block.expandable and place + 1 < len(pool.free):
            place, other = place + 1, pool.free[place + 1][2]
            if other.reach >= block.reach:
                break
            block = other
        too_large = most if most is None or size < most else size + self.settings.slack
        if too_large is not None and block.size >= too_large:
            return None
        pool.unlist(block)
        return block

    def _new(self, pool: Pool, size: int) -> Block | None:
        """A block of a new segment, or of one that grows; none beyond the limit."""
        whole = -(-size // (2 * MIB)) * 2 * MIB
        whole = max(whole, pool.page) if size < 10 * MIB else whole
        if self.limit is not None and self.reserved + whole > self.limit:
            return None
        if self.settings.expandable:
            return self._grown(pool, size)
        self._reserve(whole)
        self.top += whole
        return Block(self.top - whole, whole, pool)

    def _reserve(self, size: int) -> None:
        self.reserved += size
        self.reserved_peak = max(self.reserved_peak, self.reserved)

    def _grown(self, pool: Pool, size: int) -> Block:
        """The lowest place of an expandable segment that can grow to that size, grown to it."""
        block = next((found for found in self._ends(pool) if free_span(found) >= size), None)
        if block is None:
            block = Block(self.top, _ENDLESS, pool, True, mapped=False)
            self.top += _ENDLESS
            pool.enlist(block)
        while not block.mapped or block.size < size:
            place = block if not block.mapped else block.after
            assert place is not None
            more = size if place is block else size - block.size
            block = self._map(place, min(more, place.size))
        pool.unlist(block)
        return block

    def _ends(self, pool: Pool) -> Iterator[Block]:
        """The stretches that can grow, each with the free block in front of it."""
        for _, block in pool.unmapped:
            yield block.before if block.before is not None and block.before.free else block

    def _map(self, block: Block, size: int) -> Block:
        """Pages for the start of a stretch; the free block that has them."""
        pool = block.pool
        size = min(-(-size // pool.page) * pool.page, block.size)
        pool.unlist(block)
        if size < block.size:
            pool.split(block, size)
        block.mapped = True
        self._reserve(size)
        return pool.put(block)

    def _unmap(self, block: Block) -> None:
        """Give back the pages that a free block covers whole."""
        pool, end = block.pool, block.address + block.size
        base = first_of(block).address
        start = base - (base - block.address) // pool.page * pool.page
        stop = base + (end - base) // pool.page * pool.page
        if start >= stop:
            return
        pool.unlist(block)
        if stop < end:
            pool.split(block, stop - block.address)
        if block.address < start:
            pool.split(block, start - block.address)
            pool.enlist(block)
            block = block.after or block
            pool.unlist(block)
        block.mapped = False
        self.reserved -= block.size
        pool.put(block)

    def _give_oversized(self, pool: Pool, size: int) -> bool:
        """Give back blocks that are not split: one that is enough, else the largest until they are."""
        most = self.settings.most_split
        if most is None:
            return False
        wanted, given = max(size, most), 0
        fits = pool.free[bisect_left(pool.free, (wanted,)) :]
        largest = [block for _, _, block in fits[:1] or reversed(pool.free) if block.size >= most]
        for block in largest:
            if given >= wanted or block.expandable:
                break
            given += block.size
            self._drop(block)
        return given >= wanted

    def _drop(self, block: Block) -> None:
        block.pool.unlist(block)
        self.reserved -= block.size
