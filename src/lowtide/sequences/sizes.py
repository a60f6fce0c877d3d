"""What a unit of a scan takes in bytes, measured on its first run.

The storages that a run and its backward make are counted as they come and go, as `measure` does it: exact
for all that operators return, on the CPU and on a GPU; what a kernel takes for itself inside one call is not
seen.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from .._torch import storage_key
from ..measuring.tracker import generated_code_tells, live_storages

__all__ = ["Known", "Sizes", "Weighing"]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of one unit, beside what is held anyway (xs, parameters, stacked outputs, and their gradients).

    `state` is a carry that is kept, with the random state it needs; `record` a unit that is kept recorded,
    the carry that it hands on included; `run` and `backward` are the peaks of a recorded run and of a unit's
    backward, the latter with the record and the incoming gradient of the carry, which takes `gradient`;
    `start` is kept for the start of the sequence.
    """

    state: int
    record: int
    run: int
    backward: int
    gradient: int
    start: int = 0

    @property
    def work(self) -> int:
        """What one unit needs beside all that is kept."""
        return self.start + max(self.run + self.gradient, self.backward)


@dataclass
class Known:
    """What earlier scans have learnt of a cell.

    The bytes of a unit, and of chunks by their steps; plans for graphs that were made; how many units were
    looked at; why the cell could not be captured as a graph, where that was tried in vain.
    """

    sizes: Sizes | None = None
    chunks: dict[int, int] = field(default_factory=dict)
    plans: dict[Hashable, Any] = field(default_factory=dict)
    looked_at: int = 0
    not_captured: str | None = None


class Weighing:
    """The storages made while one unit runs forward and backward."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.tracker = live_storages(device)
        self.run = self.record = self.backward = 0

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count what is made here."""
        with generated_code_tells(self.tracker), self.tracker.mode:
            yield

    def ran(self) -> None:
        """The unit has run; its outputs are still there."""
        self.run = self.tracker.made_peak

    def recorded(self) -> None:
        """Only what is kept of a recorded unit is still there."""
        self.record = self.tracker.made_peak = self.tracker.made

    def went_back(self, gradient: int) -> None:
        """The unit has gone backward, from a carry's gradient of that size."""
        self.backward = gradient + self.tracker.made_peak

    def bytes_of(self, leaves: Iterable[Any], besides: Iterable[Any]) -> int:
        """The bytes of the storages of some leaves that are not among those of others."""
        others = {storage_key(leaf) for leaf in besides if isinstance(leaf, torch.Tensor)}
        mine = {storage_key(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}
        return sum(self.tracker.size(leaf) for key, leaf in mine.items() if key not in others)
