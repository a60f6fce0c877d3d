"""One call of a stock recurrent module in scans: its blocks are weighed, planned and run."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn import functional

from ..errors import LowtideError
from ..units import Budget, parse_budget
from .batch import Batch
from .block_plans import chosen_plans, plans_by_slots
from .blocks import BlockSequence, Layers, reversed_rows
from .chunk import Chunk
from .first import run_first
from .function import apply
from .kernel_graph import may_capture
from .loop import Loop
from .outputs import Blocks
from .planned_scan import ScanPlan
from .sizes import Known, Sizes
from .surroundings import Surroundings, devices_of
from .ways import Way, ways_of
from .weights import in_one_piece, named_weights

__all__ = ["Passage"]

_known: WeakKeyDictionary[nn.Module, dict[Hashable, Any]] = WeakKeyDictionary()

MANY = 1000
"""How many sizes and plans are remembered for a module."""


class Passage:
    """A batch on its way through the scans of a module, whose weights are looked up once."""

    def __init__(self, owner: nn.Module, module: nn.RNNBase, batch: Batch) -> None:
        self.owner, self.module, self.batch = owner, module, batch
        self.ways = ways_of(module)
        between = module.num_layers > 1 and owner.training
        self.dropout = module.dropout if between else 0.0
        self.layers = {way: self.layers_of(way) for way in self.ways}

    def layers_of(self, way: Way) -> Layers:
        weights = [
            named_weights(self.owner, self.module, [layer], reverse=way.reverse) for layer in way.layers
        ]
        if not self.dropout:
            weights = [[weight for layer in weights for weight in layer]]
        calls = tuple(in_one_piece(self.module, several) for several in weights)
        return Layers(self.module.mode, self.module.bias, calls, self.dropout)

    def plans(
        self,
        budget: int | str | Budget | None,
        slots: int | None,
        chunk: int | str,
        graphs: bool | str,
        *,
        weigh: bool = False,
    ) -> tuple[ScanPlan, ...]:
        """What each scan will do."""
        asked = None if budget is None else parse_budget(budget)
        length = None if isinstance(chunk, str) else min(chunk, self.batch.steps)
        hindrance = None if graphs is False else self.hindrance(asked)
        may = graphs if hindrance is None else False
        key = "plans", self.signature, self.batch.steps, asked, slots, length, may, weigh
        plans: tuple[ScanPlan, ...] = self.remembered(
            key, lambda: self.made_plans(asked, slots, length, may, weigh)
        )
        if graphs is True and not plans[0].graphs:
            hindrance = hindrance or f"no two blocks of its steps fit the budget {budget}"
            raise LowtideError(f'the module cannot run in CUDA graphs: {hindrance}. Write graphs="auto"')
        return plans

    def made_plans(
        self, budget: Budget | None, slots: int | None, chunk: int | None, graphs: bool | str, weigh: bool
    ) -> tuple[ScanPlan, ...]:
        steps = self.batch.steps
        if slots is not None:
            return plans_by_slots(self.ways, steps, slots, chunk, self.sizes if weigh else None)
        base = max(sum(w.numel() * w.itemsize for w in self.weights(way)) for way in self.ways)
        return chosen_plans(
            self.ways,
            steps,
            budget,
            chunk,
            self.sizes,
            base,
            self.headroom,
            places=self.places if graphs else None,
            graphs_only=graphs is True,
        )

    def hindrance(self, budget: Budget | None) -> str | None:
        """Why its blocks cannot be captured as graphs, in words."""
        if budget is None or budget.word is not None:
            return "it has no budget in bytes or as a share"
        if self.batch.sizes is not None:
            return "its rows have different lengths"
        if not may_capture(self.batch.data.device):
            return "its input is not on a CUDA device, or a graph is being captured already"
        reasons = [reason for way in self.ways if (reason := self.known(way).not_captured) is not None]
        return f"it could not be captured ({reasons[0]})" if reasons else None

    def known(self, way: Way) -> Known:
        """What earlier calls have learnt of a scan."""
        return self.remembered(("known", self.signature, way), Known)  # type: ignore[no-any-return]

    def remembered(self, key: Hashable, make: Any) -> Any:
        known = _known.setdefault(self.module, {})
        if key not in known:
            if len(known) >= MANY:
                known.clear()
            known[key] = make()
        return known[key]

    @property
    def signature(self) -> Hashable:
        """What the bytes of a block depend on, beside its scan and its length."""
        data = self.batch.data
        around = Surroundings(devices_of([data])).signature
        needed = tuple(w.requires_grad for part in self.layers.values() for call in part.calls for w in call)
        kind = data.dtype, data.device, data.requires_grad, data.is_contiguous()
        packed = self.batch.sizes is not None
        return self.batch.rows, packed, kind, needed, around, self.dropout, torch.backends.cudnn.enabled

    def sizes(self, way: Way, chunk: int) -> Sizes:
        """The bytes of a block of a scan."""
        key = "sizes", self.signature, way, chunk
        return self.remembered(key, lambda: self.weighed(way, chunk))  # type: ignore[no-any-return]

    def weighed(self, way: Way, chunk: int) -> Sizes:
        """Run a block forward and backward; the random state stays as it is."""
        rows = None if self.batch.sizes is None else torch.full((chunk,), self.batch.rows)
        sequence = BlockSequence(
            self.layers[way], chunk, chunk, way.reverse and rows is None, rows, (way, chunk)
        )
        carry = [torch.zeros_like(leaf) for leaf in self.carry(way)]
        data = self.sample(way, chunk)
        around = Surroundings(devices_of([data]))
        start = around.look()
        try:
            run = run_first(sequence, carry, [data], owner=sequence, parameters=self.weights(way), weigh=True)
        finally:
            around.go_on_from(start)
        assert run.sizes is not None
        return run.sizes if rows is None else _with_ends(run.sizes)

    @property
    def headroom(self) -> int:
        """What weighing takes for each step: the outputs and their gradients, and an input of its own."""
        width = 2 * (self.module.proj_size or self.module.hidden_size)
        width += max(way.features for way in self.ways)
        return self.batch.rows * width * self.batch.data.itemsize

    def places(self, way: Way, chunk: int) -> int:
        """The bytes of the places of a block in a graph: carry, inputs, outputs, and gradients of all."""
        data = self.batch.data
        width = 2 * (self.module.proj_size or self.module.hidden_size)
        width += way.features * (2 if way.layers[0] or data.requires_grad else 1)
        state = sum(leaf.numel() * leaf.itemsize for leaf in self.carry(way))
        return chunk * self.batch.rows * width * data.itemsize + 2 * state

    def sample(self, way: Way, chunk: int) -> torch.Tensor:
        """An input of a block: the batch's own first steps, or zeros where it does not come so."""
        first, data = way.layers[0] == 0, self.batch.data
        if first and self.batch.sizes is None:
            part = data.detach()[:chunk]
        elif self.batch.sizes is None:
            part = data.new_zeros(chunk, self.batch.rows, way.features)
        else:
            part = data.new_zeros(chunk * self.batch.rows, way.features)
        return part.requires_grad_(not first or data.requires_grad)

    def carry(self, way: Way) -> list[torch.Tensor]:
        return [leaf[way.place : way.place + len(way.layers)] for leaf in self.batch.carry]

    def weights(self, way: Way) -> list[torch.Tensor]:
        return [weight for call in self.layers[way].calls for weight in call]

    def run(self, plans: tuple[ScanPlan, ...]) -> tuple[Any, Any]:
        """The results of the module."""
        data, directions = self.batch.data, 2 if self.module.bidirectional else 1
        outputs: list[torch.Tensor] = []
        carries: list[list[torch.Tensor]] = []
        for way, plan in zip(self.ways, plans, strict=True):
            plan.say_if_slow()
            if way.layers[0] and not outputs and self.dropout:
                data = functional.dropout(data, self.dropout)
            carries.append(self.scan(way, plan, data, outputs))
            if len(outputs) == directions:
                data = torch.cat(outputs, -1) if len(outputs) > 1 else outputs[0]
                outputs.clear()
        leaves = zip(*carries, strict=True)
        return self.batch.results(
            data, [torch.cat(parts) if directions > 1 else parts[0] for parts in leaves]
        )

    def scan(
        self, way: Way, plan: ScanPlan, data: torch.Tensor, outputs: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """The last carry of a scan, whose output joins those of its layer."""
        sizes, reversal = self.batch.sizes, None
        if way.reverse and sizes is not None:
            reversal = reversed_rows(sizes).to(data.device)
            data = data.index_select(0, reversal)
        reverse = way.reverse and sizes is None
        sequence = BlockSequence(self.layers[way], self.batch.steps, plan.chunk, reverse, sizes)
        carry = self.carry(way)
        carry, (output,) = apply(self.begun(sequence, plan, carry, data, way), carry, [data])
        outputs.append(output if reversal is None else output.index_select(0, reversal))
        return carry

    def begun(
        self, sequence: BlockSequence, plan: ScanPlan, carry: list[torch.Tensor], data: torch.Tensor, way: Way
    ) -> Loop:
        """A scan after its first block, which only the loop holds on to; in graphs, before it."""
        run = run_first(sequence, carry, [data], owner=sequence, parameters=self.weights(way))
        run.known, outputs = self.known(way), Blocks(len(data))
        if not plan.graphs:
            return run.loop(sequence, plan.actions(), xs=[data], outputs=outputs)
        run.surroundings.go_on_from(run.start)
        sample = [leaf.new_empty(()).expand_as(leaf) for leaf in run.first.pieces[0].leaves]
        carry = run.first.carry  # as blocks hand it on: under autocast of another dtype than the start
        chunk = Chunk(sequence, carry, [data], [data.requires_grad], run.closed, outputs, sample)
        return run.graph_loop(chunk, plan.actions(), xs=[data], outputs=outputs)


def _with_ends(sizes: Sizes) -> Sizes:
    """The most that a block may take in which rows end: their carries are cut off, and joined again."""
    state = sizes.state
    return replace(
        sizes, record=sizes.record + state, run=sizes.run + 2 * state, backward=sizes.backward + 3 * state
    )
