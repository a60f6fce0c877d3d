"""Whether a scan runs in graphs, and in chunks of how many steps.

The longer a chunk, the fewer launches and the fewer carries there are to keep, but the more memory it takes
while it goes back. Lengths of 2, 4, 8, ... steps are planned with what their bytes should be, from those of a
single step; the best one is weighed, and the next best taken if it does not fit.
"""

from __future__ import annotations

from collections.abc import Sequence as Several
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import Any

import torch

from ..devices.allocator import rounded
from ..units import Budget, parse_budget
from .chunk import Chunk
from .first import FirstRun
from .kernel_graph import may_capture
from .outputs import Last, Outputs, Summed
from .planned_scan import ScanPlan, graph_runs, make_graph_plan, make_scan_plan
from .sequence import CellSequence
from .sizes import Sizes, Weighing

__all__ = ["Graphing"]

LONGEST = 64
"""Longer chunks save next to nothing."""

MANY = 1000
"""How many plans are remembered for a cell: one for every length that comes."""

CAPTURE = 12
"""What capturing a step costs, in steps that run in a graph: it is launched one by one, thrice."""

LAUNCH = 3
"""What it costs to launch a chunk, in steps."""


@dataclass
class Graphing:
    """A scan that may run in graphs."""

    sequence: CellSequence
    carry: list[Any]
    xs: Several[torch.Tensor]
    outputs: Outputs
    run: FirstRun

    @property
    def device(self) -> torch.device:
        return torch.device(self.run.surroundings.devices[-1])

    def hindrance(self) -> str | None:
        """Why it cannot be, in words."""
        sample = [leaf for piece in self.run.first.pieces for leaf in piece.leaves]
        leaves = [*self.carry, *self.xs, *sample]
        if any(not isinstance(leaf, torch.Tensor) for leaf in leaves):
            return "its carry or its outputs hold something that is no tensor"
        if any(leaf.device != leaves[0].device for leaf in leaves) or not leaves:
            return "its tensors are on several devices"
        if not may_capture(leaves[0].device):
            return "its tensors are not on a CUDA device, or a graph is being captured already"
        reason = self.run.known.not_captured
        return None if reason is None else f"its cell could not be captured ({reason})"

    def plan(self, budget: int | str | Budget, chunk: int | None) -> ScanPlan | None:
        """The best plan for a budget, in chunks of that many steps if given; None where no chunk fits."""
        asked, known = parse_budget(budget), self.run.known.plans
        if self.run.sizes is None or asked.word is not None:
            return None
        key = asked, chunk, self.sequence.length
        if key not in known:
            if len(known) >= MANY:
                known.clear()
            known[key] = self.made_plan(asked, chunk)
        found: ScanPlan | None = known[key]
        return found

    def made_plan(self, asked: Budget, chunk: int | None) -> ScanPlan | None:
        length = self.sequence.length
        size = asked.bytes or asked.part(self.keep_all)
        # At least two chunks to a scan: with one there is nothing to keep and nothing to recompute.
        lengths = [2**power for power in range(1, LONGEST.bit_length()) if 2 * 2**power <= length]
        costs = {steps: self.cost(steps, size) for steps in ([chunk] if chunk else lengths)}
        for steps in sorted(costs, key=costs.__getitem__):
            found = self.planned(steps, self.weigh(steps), size) if costs[steps] < inf else None
            if found is not None:
                return found
        return None

    def cost(self, steps: int, size: int) -> float:
        """Steps that run in such chunks, forward and backward, and what launching and capturing costs."""
        length = self.sequence.length
        runs = graph_runs(length, chunk=steps, sizes=self.sizes(self.guess(steps)), budget=size)
        # A backward step counts as two forward ones.
        return inf if runs is None else runs + 2 * length + CAPTURE * steps + LAUNCH * length / steps

    def sizes(self, work: int) -> Sizes:
        known = self.run.sizes
        assert known is not None
        return Sizes(self.state + known.start, work, work, work, 0, known.start)

    @property
    def state(self) -> int:
        """The bytes of a kept carry: a copy of all its leaves, also of those that stay what they are."""
        return sum(rounded(leaf.numel() * leaf.itemsize, leaf.device) for leaf in self.carry)

    @cached_property
    def keep_all(self) -> int:
        """What keeping every step takes."""
        whole = make_scan_plan(self.sequence.length, chunk=self.sequence.chunk, sizes=self.run.sizes)
        assert whole.keep_all is not None
        return whole.keep_all

    def planned(self, steps: int, work: int, size: int) -> ScanPlan | None:
        length = self.sequence.length
        return make_graph_plan(
            length,
            chunk=steps,
            sizes=self.sizes(work),
            budget=size,
            keep_all=self.keep_all,
            recomputes_last=length % steps == 0 and not isinstance(self.outputs, Last),
        )

    def guess(self, steps: int) -> int:
        """About what a chunk takes, from the bytes of a unit."""
        known, unit = self.run.sizes, self.sequence.chunk
        assert known is not None
        return self.places(steps) + known.work + known.record * max(steps - unit, 0) // unit

    def places(self, steps: int) -> int:
        """The bytes of the places of a chunk: carry, inputs, outputs, and gradients of all."""
        each: int = sum(leaf[0].numel() * leaf.itemsize for leaf in self.xs)
        if not isinstance(self.outputs, Last):
            each += sum(leaf.numel() * leaf.itemsize for leaf in self.sample)
        # Twice: each place has one for its gradient.
        return 2 * (steps * each + self.state)

    @property
    def sample(self) -> list[torch.Tensor]:
        return self.run.first.pieces[0].leaves

    def chunk(self, steps: int) -> Chunk:
        return Chunk(
            replace(self.sequence, chunk=steps),
            self.carry,
            self.xs,
            [leaf.requires_grad for leaf in self.xs],
            self.run.closed,
            self.outputs,
            self.sample,
        )

    def weigh(self, steps: int) -> int:
        """The bytes of a chunk that goes back, measured on its first steps; the random state stays."""
        known = self.run.known.chunks
        if steps not in known:
            present = self.run.surroundings.look()
            known[steps] = self.places(steps) + self.taken(steps)
            self.run.surroundings.go_on_from(present)
        return known[steps]

    def taken(self, steps: int) -> int:
        """The most bytes that are there while a chunk runs and goes back, beside its places."""
        weighing = Weighing(self.device)
        closed = self.run.closed
        chunk = self.chunk(steps)
        chunk.start_from([leaf.detach() for leaf in self.carry])
        chunk.read(0, [leaf.detach() for leaf in self.xs])
        kind = self.outputs if isinstance(self.outputs, Last) else Summed(steps)
        chunk.prepare_to_go_back(kind, [torch.zeros_like(leaf) for leaf in self.sample])
        with weighing.counting(), closed.without_hooks():
            chunk.go_back([_Nowhere()] * len(closed.tensors))
        return weighing.tracker.made_peak


class _Nowhere:
    """Takes the gradients of closed-over tensors and keeps none."""

    tensor = ()

    def add(self, gradient: torch.Tensor | None) -> None:
        """Let go of it."""
