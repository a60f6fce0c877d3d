"""A second model of torch's CUDA caching allocator: slow, and written from its rules alone.

A segment is an array of owners, one byte for each 512 bytes: 0 is free, 255 an address without memory. Free
blocks are the runs of zeros; there are no lists of blocks, no merging and no splitting to get wrong.
"""

import re
from itertools import pairwise

UNIT = 512
MIB = 2**20
SMALL, LARGE = "small", "large"
NOTHING = 255


class NaiveAllocator:
    def __init__(self, settings, limit=None):
        self.settings, self.limit = settings, limit
        self.segments = []  # pairs of a pool and its owners
        self.place = {}  # of an owner: its segment
        if settings.expandable:
            self.segments = [(SMALL, bytearray()), (LARGE, bytearray())]

    @property
    def reserved(self):
        return sum(UNIT * (len(owners) - owners.count(NOTHING)) for _, owners in self.segments)

    @property
    def allocated(self):
        return self.reserved - sum(UNIT * owners.count(0) for _, owners in self.segments)

    def held(self, owner):
        return UNIT * self.place[owner].count(owner)

    def rounded(self, size):
        parts = self.settings.divisions[0 if size < 2 * MIB else min((size // MIB).bit_length() - 1, 15)]
        if parts > 1 and size > 512 * parts:
            power = 512
            while 2 * power <= size:
                power *= 2
            return next(n for k in range(parts + 1) if (n := power + k * (power // parts)) >= size)
        return -(-size // UNIT) * UNIT

    def allocate(self, owner, asked):
        size = self.rounded(asked)
        pool = SMALL if size <= MIB else LARGE
        found = self.best(pool, size)
        for free_some in (lambda: True, lambda: self.free_oversized(pool, size), self.free_all):
            found = found or (free_some() and self.more(pool, size))
        if not found:
            return False
        owners, start, stop = found
        rest = (stop - start) * UNIT - size
        most = self.settings.most_split
        if self.settings.expandable or pool == SMALL:
            whole = rest < 512
        else:
            whole = rest <= MIB or (most is not None and size >= most)
        stop = stop if whole else start + size // UNIT
        owners[start:stop] = bytes([owner]) * (stop - start)
        self.place[owner] = owners
        return True

    def release(self, owner):
        owners = self.place.pop(owner)
        owners[:] = owners.replace(bytes([owner]), b"\0")

    def free_runs(self, pool):
        """By size and address."""
        found = [
            (run.end() - run.start(), number, run.start())
            for number, (kind, owners) in enumerate(self.segments)
            if kind == pool
            for run in re.finditer(rb"\0+", owners)
        ]
        return [(self.segments[n][1], start, start + length) for length, n, start in sorted(found)]

    def best(self, pool, size):
        fits = [run for run in self.free_runs(pool) if (run[2] - run[1]) * UNIT >= size]
        if not fits:
            return None
        run = self.least_reach(fits) if self.settings.expandable else fits[0]
        length, most = (run[2] - run[1]) * UNIT, self.settings.most_split
        if most is not None and (length >= most if size < most else length >= size + self.settings.slack):
            return None
        return run

    def least_reach(self, fits):
        """The first that no later one in a row is better than, counting what each can grow to."""
        for here, after in pairwise(fits):
            if self.reach(after) >= self.reach(here):
                return here
        return fits[-1]

    def reach(self, run):
        owners, start, stop = run
        if stop == len(owners):
            return float("inf")
        following = re.compile(rb"\xff*").match(owners, stop).end()
        return float("inf") if following == len(owners) else following - start

    def more(self, pool, size):
        page = 2 * MIB if pool == SMALL else self.settings.shared_segment
        whole = page if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
        if self.limit is not None and self.reserved + whole > self.limit:
            return None
        if self.settings.expandable:
            return self.grow(pool, size // UNIT, page // UNIT)
        owners = bytearray(whole // UNIT)
        self.segments.append((pool, owners))
        return owners, 0, len(owners)

    def grow(self, pool, units, page):
        """Pages in the lowest gap that holds the request with the free block before it, or at the end."""
        owners = next(owners for kind, owners in self.segments if kind == pool)
        for first in [gap.start() for gap in re.finditer(rb"\xff+", owners)] + [len(owners)]:
            start = len(owners[:first].rstrip(b"\0"))
            stop = re.compile(rb"[\0\xff]*").match(owners, start).end()
            if stop - start >= units or stop == len(owners):
                break
        owners += bytes([NOTHING]) * (-(-(start + units) // page) * page - len(owners))
        for at in range(start // page * page, start + units, page):
            if owners[at] == NOTHING:
                owners[at : at + page] = bytes(page)
        return next(run for run in self.free_runs(pool) if run[1] <= start < run[2])

    def free_oversized(self, pool, size):
        most = self.settings.most_split
        if most is None or self.settings.expandable:
            return False
        wanted, given = max(size, most), 0
        wholes = [run for run in self.free_runs(pool) if (run[2] - run[1]) * UNIT >= most]
        enough = [run for run in wholes if (run[2] - run[1]) * UNIT >= wanted]
        for owners, start, stop in enough[:1] or reversed(wholes):
            if given >= wanted:
                break
            given += (stop - start) * UNIT
            self.segments = [pair for pair in self.segments if pair[1] is not owners]
        return given >= wanted

    def free_all(self):
        if not self.settings.expandable:
            self.segments = [pair for pair in self.segments if any(pair[1])]
            return True
        for pool, owners in self.segments:
            page = (2 * MIB if pool == SMALL else self.settings.shared_segment) // UNIT
            for start in range(0, len(owners), page):
                if not any(owners[start : start + page]):
                    owners[start : start + page] = bytes([NOTHING]) * page
        return True
