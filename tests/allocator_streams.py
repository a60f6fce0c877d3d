"""A random stream of requests, served by torch's CUDA allocator and by its replay, as a program of its own.

It starts from an empty allocator with the settings of the environment, and prints where the two differ. Of
equal blocks the one with the lowest address is taken, and the device has its segments where it likes: the
replay is told.
"""

from __future__ import annotations

import json
from random import Random

import torch

from lowtide.devices.caching_allocator import CachingAllocator
from lowtide.devices.memory import cuda_memory

MIB = 1 << 20


class OnDevice:
    """torch's own allocator behind the names of the replay."""

    def allocate(self, size):
        return torch.empty(size, dtype=torch.uint8, device="cuda")

    def release(self, block):
        block.untyped_storage().resize_(0)

    def address(self, block):
        return block.data_ptr()

    @property
    def state(self):
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


class OnPaper(CachingAllocator):
    """The replay, from what the device holds now."""

    def address(self, block):
        """None: the replay's own addresses rise, whatever it stands beside."""

    def move(self, block, address):
        """Move a block, and what is after it in its segment."""
        shift = 0 if address is None else address - block.address
        while shift and block is not None:
            free = block.free
            if free:
                block.pool.unlist(block)
            block.address += shift
            if free:
                block.pool.enlist(block)
            block = block.after

    @property
    def state(self):
        return self.allocated, self.reserved


def differences(left, right, seed, requests=300):
    """The requests after which (allocated, reserved) differ, with both."""
    chance, held, found = Random(seed), [], []
    for number in range(requests):
        size = chance.choice([chance.randint(1, 2 * MIB), chance.randint(MIB, 64 * MIB)])
        reserved = right.reserved
        held.append((left.allocate(size), right.allocate(size)))
        if right.reserved > reserved and not right.settings.expandable:
            right.move(held[-1][1], left.address(held[-1][0]))
        while held and chance.random() < 0.45:
            for side, block in zip((left, right), held.pop(chance.randrange(len(held))), strict=True):
                side.release(block)
        if left.state != right.state:
            found.append((number, left.state, right.state))
    for blocks in held:
        for side, block in zip((left, right), blocks, strict=True):
            side.release(block)
    return found


def main():
    torch.ones(1, device="cuda")  # the allocator is there from now on, and holds a segment
    now = cuda_memory(torch.device("cuda", 0))
    paper = OnPaper(now.segments, now.settings)
    print(json.dumps([differences(OnDevice(), paper, seed) for seed in range(5)]))


if __name__ == "__main__":
    main()
