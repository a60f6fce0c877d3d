"""Room for the state that an optimizer is to make, set aside before a plan's first step.

State stays for good. If it came to lie in the arena, between what the step needs, it would be in the way of
later plans. So its bytes, which the plan counts from the start, are requested before the arena is laid, and
let go of when the optimizer steps. torch serves a request from the smallest free block that holds it: holes
that are smaller than the room are plugged meanwhile, larger ones left for what the optimizer makes besides.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .allocator_settings import MIB

if TYPE_CHECKING:
    from .blocks import Block
    from .caching_allocator import CachingAllocator

__all__ = ["Aside", "Hole", "plugs_for", "spare_for"]

Hole = tuple[int, int]
"""The bytes of a free block, and its address."""
_SHARED = 20 * MIB
_OWN = 10 * MIB
"""Requests below this share segments of 20 MiB. Beside larger ones a free one is there, too: small ones may
pack less well the second time, and would take the room of a large one."""


@dataclass(frozen=True)
class Aside:
    """Room on paper: the requests for state, the blocks set aside, and the holes that were beside them."""

    state: Sequence[int]
    blocks: Sequence[Block]
    holes: Collection[Hole]

    @classmethod
    def of(cls, allocator: CachingAllocator, state: Sequence[int]) -> Aside:
        blocks = [allocator.allocate(size) for size in state if size]
        for size in spare_for(state):
            allocator.release(allocator.allocate(size))
        return cls(state, blocks, set(allocator.holes()))

    def fill(self, allocator: CachingAllocator) -> list[Block]:
        """The first step of the optimizer."""
        holes = allocator.holes() if self.blocks else ()
        plugs = [allocator.allocate(size) for size in plugs_for(self.state, holes)]
        beside = [block for block in plugs if (block.size, block.address) in self.holes]
        plugs = [block for block in plugs if block not in beside]
        for block in (*self.blocks, *beside):
            allocator.release(block)
        made = [allocator.allocate(size) for size in self.state if size]
        for block in plugs:
            allocator.release(block)
        return made


def spare_for(state: Sequence[int]) -> list[int]:
    """What to have free beside the room."""
    small, large = any(MIB < size < _OWN for size in state), any(size > _SHARED for size in state)
    return [_SHARED] if small and large else []


def plugs_for(state: Sequence[int], holes: Iterable[Hole]) -> list[int]:
    """The sizes of the holes that would be taken before the room.

    All are requested, as of equal ones any may be given; those that were there before are part of the room.
    """
    most = max([_SHARED, *state])
    return [size for size, _ in holes if MIB < size <= most]
