"""A CUDA device on paper: the replay of the allocator in the place of torch's own, for a loop that trains.

A loop brings a new batch for each step before it lets go of the last one, lets go of the gradients, and steps
an optimizer whose state comes with its first step. Each plan is made from what the device holds then, as a
capped step does it, and the device is made ready for it in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from lowtide.devices.aside import Aside
from lowtide.devices.blocks import Block, first_of
from lowtide.devices.caching_allocator import CachingAllocator, Segment
from lowtide.devices.memory import DeviceMemory
from lowtide.devices.reserved import OPTIMIZER, StepRequests, coming_state
from lowtide.planner.under_budget import plan_graph
from lowtide.plans.events import events
from lowtide.plans.graph import Graph
from lowtide.plans.planned_step import Plan

__all__ = ["PaperLoop"]


@dataclass
class PaperLoop:
    """A loop over steps of one model: the graphs of its batches, each with the number of its steps."""

    graphs: Sequence[tuple[Graph, int]]
    budget: int
    allocator: CachingAllocator = field(default_factory=CachingAllocator)
    live: set[Block] = field(default_factory=set)
    ready: bool = False

    def run(self) -> Iterator[tuple[Plan, int]]:
        """Each plan, with what was reserved at most while its steps ran."""
        model = self.graphs[0][0]
        self.make(value.bytes for value in model.values if value.kind in ("parameter", "buffer"))
        batch: list[Block] = []
        kept: list[Block] = []
        aside: Aside | None = None
        for graph, steps in self.graphs:
            plan = None
            for _ in range(steps):
                new = self.make(value.bytes for value in graph.values if value.kind == "input")
                self.let_go(batch)
                self.let_go(kept)
                batch = new
                if plan is None:
                    plan = self.planned(graph)
                    if not self.ready:
                        aside = Aside.of(self.allocator, coming_state(plan.graph, self.allocator.allocated))
                        self.live.update(aside.blocks)
                    self.lay(plan)
                kept = self.step(plan)
                if aside is not None:
                    self.live.difference_update(aside.blocks)
                    self.live.update(aside.fill(self.allocator))
                    aside = None
            assert plan is not None
            yield plan, self.allocator.reserved_peak

    def planned(self, graph: Graph) -> Plan:
        bare = graph.replace(fixed={OPTIMIZER: graph.fixed[OPTIMIZER]})
        plan = plan_graph(bare, self.budget, device=self.memory())
        self.allocator.give_back()
        return plan

    def lay(self, plan: Plan) -> None:
        if plan.arena:
            self.allocator.release(self.allocator.allocate(plan.arena))
        self.ready = True
        self.allocator.begin()

    def step(self, plan: Plan) -> list[Block]:
        """Serve a step; what it leaves to its caller."""
        requests = StepRequests(plan.graph, self.allocator)
        for event in events(plan.graph, plan.schedule):
            requests.enter(event)
        self.live.update(requests.blocks.values())
        return list(requests.blocks.values())

    def make(self, sizes: Iterator[int] | Sequence[int]) -> list[Block]:
        made = [self.allocator.allocate(size) for size in sizes if size]
        self.live.update(made)
        return made

    def let_go(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            self.live.remove(block)
            self.allocator.release(block)

    def memory(self) -> DeviceMemory:
        segments = self.segments()
        large = (block for segment in segments if not segment.small for block in segment.blocks)
        blocks = tuple(size for size, free in large if free)
        return DeviceMemory("cuda", blocks=blocks, segments=segments, has_run=self.ready)

    def segments(self) -> tuple[Segment, ...]:
        pools = self.allocator.small, self.allocator.large
        known = [*self.live, *(block for pool in pools for _, _, block in pool.free)]
        firsts = {first.address: first for first in map(first_of, known)}
        return tuple(
            Segment(
                address,
                tuple((b.size, b.free) for b in from_first(first)),
                first.pool is self.allocator.small,
            )
            for address, first in sorted(firsts.items())
        )


def from_first(block: Block | None) -> Iterator[Block]:
    """The blocks of a segment."""
    while block is not None:
        yield block
        block = block.after
