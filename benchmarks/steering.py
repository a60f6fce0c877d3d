"""Offline placement, enforced on torch's own allocator: requests steered to offsets that were planned.

    PYTHONPATH=src python benchmarks/steering.py              # by replay; writes results/steering.jsonl
    PYTHONPATH=src python benchmarks/steering.py --only gpt resnet50

torch serves a request from the smallest free block that holds it. So a request goes where it was planned
to go if, while it is made, plugs lie in the free blocks that would be taken before that one, and in front
of the planned offset where this is inside of a block: requests of just these sizes, released right after.
All of it is known when a step is planned; a step would run with a list of plug sizes for each of its
requests. Here the replay of the allocator does that, in one expandable segment that has grown to the
arena's size (there blocks are split to 512 bytes). A row says whether every large request of a step, and
of the step after it, came to lie where it was planned, how many plugs that took, and what is reserved for
it above what is alive.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import lowtide
from commit import commit
from fragmentation import MIB, recorded
from headtohead_models import SUBJECTS
from lowtide.devices.allocator_settings import AllocatorSettings
from lowtide.devices.blocks import Block
from lowtide.devices.caching_allocator import CachingAllocator, Segment
from lowtide.devices.memory import memory_by_name
from lowtide.planner.under_budget import plan_graph
from placement import Arena, Stay, best_arena, live_peak

RESULTS = Path(__file__).parent / "results"
BUDGETS = (None, "80%", "60%", "40%", "min")
DEVICE = "H200"
PAGE = 20 * MIB


@dataclass
class Steered:
    """An allocator whose large requests come to lie at offsets; `plugs` counts those of each request."""

    size: int
    plugs: list[int] = field(default_factory=list)
    misplaced: int = 0

    def __post_init__(self) -> None:
        grown = -(-self.size // PAGE) * PAGE
        segment = Segment(0, ((grown, True),), expandable=True)
        self.allocator = CachingAllocator([segment], AllocatorSettings(expandable=True))

    def allocate(self, size: int, offset: int) -> Block:
        plugs: list[Block] = []
        hole = self.hole(offset)
        if hole is not None and hole < offset:
            plugs.append(self.at(hole, offset - hole, plugs))
        block = self.at(offset, size, plugs)
        self.misplaced += block.address != offset
        for plug in plugs:
            self.allocator.release(plug)
        self.plugs.append(len(plugs))
        return block

    def at(self, offset: int, size: int, plugs: list[Block]) -> Block:
        """A block there, once what would be taken before it is plugged; elsewhere where there is none."""
        while True:
            block = self.allocator.allocate(size)
            rest = block.after.size if block.after is not None and block.after.free else 0
            if block.address == offset or block.address >= self.size:
                return block
            self.allocator.release(block)
            plugs.append(self.allocator.allocate(size + rest))

    def hole(self, offset: int) -> int | None:
        """Where the free block begins that an offset is in."""
        free = (block for _, _, block in self.allocator.large.free)
        return next((each.address for each in free if 0 <= offset - each.address < each.size), None)


def steer(stays: Sequence[Stay], arena: Arena) -> Steered:
    """Two steps of these requests."""
    steered = Steered(arena.size)
    times = [(stay.start, 1, at) for at, stay in enumerate(stays)]
    times += [(stay.end, 0, at) for at, stay in enumerate(stays)]
    for _ in range(2):
        held: dict[int, Block] = {}
        for _, begins, at in sorted(times):
            if begins:
                held[at] = steered.allocate(stays[at].size, arena.offsets[at])
            else:
                steered.allocator.release(held.pop(at))
    return steered


def row(stays: Sequence[Stay]) -> dict[str, Any]:
    arena = best_arena(stays)
    steered = steer(stays, arena)
    return {
        "requests": len(stays),
        "live": live_peak(stays),
        "reserved": steered.allocator.reserved_peak,
        "misplaced": steered.misplaced,
        "plugs": round(sum(steered.plugs) / len(steered.plugs), 3),
        "most_plugs": max(steered.plugs),
    }


def line(found: dict[str, Any]) -> str:
    over = found["reserved"] / found["live"] - 1
    return (
        f"{found['model']:14} {found['budget']:6} {found['live'] >> 20:6} MiB {over:+6.1%}  misplaced "
        f"{found['misplaced']} of {found['requests']}, plugs {found['plugs']:.1f}, most {found['most_plugs']}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=list(SUBJECTS), default=list(SUBJECTS))
    parser.add_argument("--out", type=Path, default=RESULTS / "steering.jsonl", help="the file of results")
    args = parser.parse_args()
    lines = map(json.loads, args.out.open()) if args.out.exists() else ()
    kept = [each for each in lines if each["model"] not in args.only]
    for name in args.only:
        model, batch = SUBJECTS[name].build("meta")
        graph = lowtide.plan(model, *batch, device=DEVICE).graph
        torch._dynamo.reset()
        for budget in BUDGETS:
            try:
                plan = plan_graph(graph, budget, device=memory_by_name(DEVICE))
            except lowtide.BudgetTooSmall:
                continue
            stays = [stay for stay in recorded(plan) if stay.size > MIB]
            found = {"model": name, "budget": budget or "none", **row(stays)}
            kept.append({**found, "torch": torch.__version__, "commit": commit()})
            print(line(found), flush=True)
            args.out.write_text("".join(json.dumps(each) + "\n" for each in kept))


if __name__ == "__main__":
    main()
