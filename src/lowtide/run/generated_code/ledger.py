"""The bytes of storages, counted for as long as they live."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ...capture.fx_nodes import storage_of

__all__ = ["Handed", "Ledger"]


@dataclass(frozen=True)
class Handed:
    """A tensor that a graph is given or gives back: which storage it lies in, and that storage's bytes.

    Equal numbers are the same storage. Among a footprint's outputs, a number below the number of inputs is
    the storage of the input at that place.
    """

    storage: int
    bytes: int


class Ledger:
    """Counts the bytes of storages for as long as they live."""

    def __init__(self, rounded: Callable[[int], int]) -> None:
        self.rounded = rounded
        self.known: dict[int, Handed] = {}
        self.count = 0
        self.live = 0
        self.peak = 0

    def allocate(self, tensor: torch.Tensor, *, counts: bool = True) -> None:
        """A storage that the graph makes, unless it is known already."""
        if storage_of(tensor) not in self.known:
            size = self.rounded(tensor.untyped_storage().nbytes()) if counts else 0
            self.enter(tensor, size)
            self.live += size
            self.peak = max(self.peak, self.live)

    def enter(self, tensor: torch.Tensor, size: int) -> None:
        self.known[storage_of(tensor)] = Handed(self.count, size)
        self.count += 1
        # The storage's own life is the count: no need to follow views, aliases and reuse by hand.
        weakref.finalize(tensor.untyped_storage(), self.leave, storage_of(tensor))

    def leave(self, key: int) -> None:
        self.live -= self.known.pop(key).bytes
