"""Blocks of memory as a caching allocator has them: stretches of segments that know their neighbours.

A pool lists free blocks by size and address, and those stretches of expandable segments that are addresses
alone. Listing and unlisting take a search by halves and the shift of a list.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

__all__ = ["Block", "Pool", "first_of", "free_span", "join"]


@dataclass(eq=False, slots=True)
class Block:
    """A stretch of a segment and its neighbours there; `pool` serves it.

    What is not `mapped` is an address without memory.
    """

    address: int
    size: int
    pool: Pool
    expandable: bool = False
    free: bool = False
    mapped: bool = True
    before: Block | None = None
    after: Block | None = None

    @property
    def reach(self) -> int:
        """The bytes that a free block could have if its segment grew."""
        grows = self.after is not None and not self.after.mapped
        return self.size + (self.after.size if grows and self.after is not None else 0)


@dataclass(eq=False)
class Pool:
    """Free blocks by size and address, and the stretches of expandable segments that are only addresses."""

    page: int
    least_rest: int
    free: list[tuple[int, int, Block]] = field(default_factory=list)
    unmapped: list[tuple[int, Block]] = field(default_factory=list)

    def enlist(self, block: Block) -> None:
        block.free = True
        if block.mapped:
            insort(self.free, (block.size, block.address, block))
        else:
            insort(self.unmapped, (block.address, block))

    def unlist(self, block: Block) -> None:
        block.free = False
        if block.mapped:
            del self.free[bisect_left(self.free, (block.size, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.address,))]

    def split(self, block: Block, size: int) -> None:
        """Cut a block, of memory or of addresses, after `size` bytes; what is after it is listed as free."""
        rest = Block(block.address + size, block.size - size, self, block.expandable, mapped=block.mapped)
        join(rest, block.after)
        join(block, rest)
        block.size = size
        self.enlist(rest)

    def put(self, block: Block) -> Block:
        """List a block as free, grown over its neighbours that are so."""
        for other in block.before, block.after:
            if other is not None and other.free and other.mapped == block.mapped:
                self.unlist(other)
                if other is block.before:
                    block.address = other.address
                    join(other.before, block)
                else:
                    join(block, other.after)
                block.size += other.size
        self.enlist(block)
        return block


def first_of(block: Block) -> Block:
    """The first block of its segment."""
    while block.before is not None:
        block = block.before
    return block


def free_span(block: Block) -> int:
    """The bytes of a free stretch and of those after it, mapped or not."""
    size, here = 0, block if block.free else None
    while here is not None:
        size, here = size + here.size, here.after if here.after is not None and here.after.free else None
    return size


def join(left: Block | None, right: Block | None) -> None:
    """Make two blocks neighbours."""
    if left is not None:
        left.after = right
    if right is not None:
        right.before = left
