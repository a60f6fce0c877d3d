"""The largest batch that fits a budget, uncapped and capped, and what each costs. Nothing is run.

Problem: how many samples fit into n bytes? Trying it on the device means running out of memory again
and again, and says nothing of a device that is not there.

Method: the step is made at a few batch sizes, on the meta device where that works, and traced under fake
tensors; keeping everything gives its uncapped peak, the planner its smallest one. `size_search` says which
sizes to look at. The answer was looked at itself: its plan is at hand, and one sample more was seen not to
fit (uncapped; capped, 1 % more). A handful of traces and searches in all.

Limits: peaks are taken to grow with the batch. What no plan was found for may have one: the planner is a
search. Seconds are those of the roofline.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..arguments import function, one_of, whole
from ..devices.memory import memory_of
from ..entry.user_step import capture_step, make_step
from ..errors import BudgetError, BudgetTooSmall, LowtideError
from ..planner.budgets import resolve
from ..planner.under_budget import plan_graph
from ..plans import json_format
from ..plans.planned_step import Plan
from ..solve import find_method
from ..units import Budget, format_bytes, format_seconds, parse_budget
from .size_search import EXACT, SizeSearch

__all__ = ["Batch", "LargestBatch", "largest_batch"]

FIRST = 4
"""The first batch size to look at: one sample alone is a special case of many models."""
CLOSE = 100
"""How finely to look for the capped answer: to one sample in this many. The planner is no more exact."""
APART = 1.25
"""How much larger a batch is than the one in the line above it, in print."""


@dataclass(frozen=True)
class Batch:
    """A number of samples and their plan under the budget."""

    size: int
    plan: Plan

    @property
    def seconds(self) -> float:
        """Predicted seconds for one sample."""
        return self.plan.seconds / self.size

    def to_dict(self) -> dict[str, Any]:
        """The figures as plain data."""
        plan = self.plan
        return {"size": self.size, "peak": plan.peak, "seconds": plan.seconds, "per_sample": self.seconds}


@dataclass(frozen=True)
class LargestBatch:
    """What `largest_batch` found; prints as a table.

    `uncapped` is the largest batch that fits as it is, None where none does. `capped` are larger ones that
    were looked at and fit under a cap, the largest last. `most` says that larger ones were not looked for.

    >>> import lowtide, torch
    >>> found = lowtide.largest_batch(lambda n: (torch.nn.Linear(64, 8), torch.empty(n, 64)), "256KiB")
    >>> found.largest.size, found.largest.plan.peak <= 256 * 1024
    (677, True)
    """

    budget: int
    uncapped: Batch | None
    capped: tuple[Batch, ...]
    most: int

    @property
    def largest(self) -> Batch:
        """The largest batch that fits."""
        found = self.capped[-1] if self.capped else self.uncapped
        assert found is not None
        return found

    def to_json(self) -> str:
        """The figures as JSON text."""
        graph = self.largest.plan.graph
        data: dict[str, Any] = {
            "lowtide": "batch",
            "version": 1,
            "device": graph.device,
            "prices": graph.prices,
            "budget": self.budget,
            "optimizer": graph.fixed.get("optimizer", 0),
            "most": self.most,
            "uncapped": None if self.uncapped is None else self.uncapped.to_dict(),
            "capped": [batch.to_dict() for batch in self.capped],
        }
        return json_format.dump(data)

    def __str__(self) -> str:
        graph = self.largest.plan.graph
        state = graph.fixed.get("optimizer")
        counted = f"optimizer state {format_bytes(state)}" if state else "without optimizer state"
        lines = [
            f"largest batch under {format_bytes(self.budget)} on {graph.device}, {counted} ({graph.prices})",
            f"{'':8}  {'batch':>7}  {'peak':>11}  {'step time':>9}  per sample",
            f"uncapped  {'none':>7}" if self.uncapped is None else self._line("uncapped", self.uncapped),
            *(self._line("capped", batch) for batch in self._told()),
        ]
        if self.largest.size == self.most:
            lines.append(f"batches above {self.most} were not looked at")
        elif not self.capped:
            lines.append("no plan was found for a larger batch")
        return "\n".join(lines + [f"note: {note}" for note in self.largest.plan.notes])

    def _told(self) -> list[Batch]:
        """The capped batches that are worth a line: the largest, and smaller ones that are far apart."""
        told = list(self.capped[-1:])
        for batch in reversed(self.capped[:-1]):
            if batch.size * APART <= told[0].size:
                told.insert(0, batch)
        return told

    def _line(self, name: str, batch: Batch) -> str:
        extra = ""
        if self.uncapped is not None and batch is not self.uncapped:
            extra = f"  {batch.seconds / self.uncapped.seconds - 1:+.1%}"
        return (
            f"{name:8}  {batch.size:>7}  {format_bytes(batch.plan.peak):>11}  "
            f"{format_seconds(batch.plan.seconds):>9}  {format_seconds(batch.seconds):>10}{extra}"
        )


def largest_batch(
    make: Callable[[int], Any],
    budget: int | str | Budget,
    *,
    device: str | None = None,
    executor: str = "eager",
    method: str = "auto",
    optimizer: Any = None,
    most: int = 1 << 16,
    progress: Callable[[str], None] | None = None,
) -> LargestBatch:
    """The largest batch that fits a budget, uncapped and capped, without running anything.

    `make(batch_size)` returns the model and a batch of that size, as in `return model, x, y`. A budget may be
    "90% of device", but no share of the uncapped peak, which grows with the batch. `device` names one that is
    not here, as in "H200"; `optimizer` is a class of torch.optim, or its name, whose state the budget has to
    cover. Raises `BudgetTooSmall` where not even one sample fits.

    >>> import lowtide, torch
    >>> def make(size):
    ...     return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()), torch.empty(size, 64)
    >>> lowtide.largest_batch(make, "1MiB").uncapped.size
    806
    """
    function("make", make, "make(batch_size)")
    whole("most", most)
    one_of("executor", executor, ("eager", "inductor"))
    find_method(method)
    tell = (lambda label: None) if progress is None else function("progress", progress, "progress(label)")
    asked = _sized(parse_budget(budget))
    steps = _Steps(make, {"device": device, "executor": executor, "optimizer": optimizer}, tell)
    size = _bytes(asked, steps.plan(min(FIRST, most)), device)
    plain = SizeSearch(size, most, EXACT)
    # Uncapped first: that only takes tracing, and its line says where to look for capped ones.
    fits = plain.run(lambda batch: steps.fits(batch, size), first=FIRST)
    capped = _Capped(steps, Budget(asked.text, size), method)
    if not SizeSearch(size, most, CLOSE, plain.start(), fits).run(capped.fits, first=max(2 * fits, 1)):
        raise capped.refusal()
    capped.fill_the_gap()
    return LargestBatch(
        budget=size,
        uncapped=Batch(fits, steps.plan(fits)) if fits else None,
        capped=tuple(Batch(batch, plan) for batch, plan in sorted(capped.plans.items())),
        most=most,
    )


def _sized(asked: Budget) -> Budget:
    """A budget that does not move with the batch."""
    instead = 'write bytes, as in "24GiB", or "90% of device"'
    if asked.word == "min":
        raise BudgetError(f'budget "min" fits no batch but the smallest; {instead}')
    if asked.is_knee:
        raise BudgetError(f'budget "knee" moves with the batch, so it limits none; {instead}')
    if asked.is_share_of_peak:
        raise BudgetError(
            f"budget {asked} is a share of the uncapped peak, which grows with the batch, so it limits none; "
            f"{instead}"
        )
    return asked


def _bytes(asked: Budget, vanilla: Plan, target: str | None) -> int:
    size = resolve(asked, vanilla.peak, memory_of(vanilla.graph, target))
    assert size is not None
    return size


@dataclass
class _Steps:
    """The plans that keep everything, of one step at several batch sizes."""

    make: Callable[[int], Any]
    options: dict[str, Any]
    tell: Callable[[str], None]
    on_meta: bool = True
    plans: dict[int, Plan] = field(default_factory=dict)

    def plan(self, size: int) -> Plan:
        if size not in self.plans:
            self.tell(f"tracing a batch of {size}")
            self.plans[size] = self.trace(size)
        return self.plans[size]

    def fits(self, size: int, budget: int) -> tuple[bool, int]:
        """Whether a batch fits as it is, and its peak."""
        plan = self.plan(size)
        return plan.peak <= budget, plan.allocated  # what is reserved grows by whole segments

    def trace(self, size: int) -> Plan:
        """The step on the meta device, where nothing is allocated; as it is where that does not work."""
        import torch

        with torch.random.fork_rng(devices=[]):
            if self.on_meta:
                try:
                    with torch.device("meta"):
                        step = make_step(self.make, size)
                    return capture_step(step, **self.options)
                # Some models cannot be made on the meta device (they read data while they are built): then
                # with memory.
                except LowtideError:
                    self.on_meta = False
            return capture_step(make_step(self.make, size), **self.options)


@dataclass
class _Capped:
    """The plans under the budget, at several batch sizes."""

    steps: _Steps
    budget: Budget
    method: str
    plans: dict[int, Plan] = field(default_factory=dict)
    refused: dict[int, BudgetTooSmall] = field(default_factory=dict)

    def fits(self, size: int) -> tuple[bool, int]:
        """Whether a batch has a plan, and the smallest peak found for it."""
        vanilla = self.steps.plan(size)
        self.steps.tell(f"planning a batch of {size}")
        try:
            plan = self.plans[size] = self.under(self.budget, vanilla)
        except BudgetTooSmall as error:
            self.refused[size] = error
            return False, error.smallest
        return True, min(plan.allocated, self.under(parse_budget("min"), vanilla).allocated)

    def fill_the_gap(self) -> None:
        """Plan a batch between the two largest where they are far apart: the last samples cost most."""
        sizes = sorted(self.plans)[-2:]
        if len(sizes) == 2 and sizes[1] > 2 * sizes[0]:
            # The geometric mean: half way by factors, as sizes are compared.
            self.fits(math.isqrt(sizes[0] * sizes[1]))

    def under(self, budget: Budget, vanilla: Plan) -> Plan:
        device = memory_of(vanilla.graph, self.steps.options["device"])
        return plan_graph(vanilla.graph, budget, method=self.method, device=device, notes=vanilla.notes)

    def refusal(self) -> BudgetTooSmall:
        """The error of one sample that does not fit."""
        error = self.refused[min(self.refused)]
        told = f"not even one sample fits: {error}"
        return BudgetTooSmall(told, budget=error.budget, smallest=error.smallest, parts=error.parts)
