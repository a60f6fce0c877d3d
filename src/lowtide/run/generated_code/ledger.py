"""The bytes of storages, counted for as long as they live, and the requests and calls in their order."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch

from ...capture.fx_nodes import storage_of
from .moment import Moment

__all__ = ["Entry", "Handed", "Ledger", "Request"]


class Request(NamedTuple):
    """A storage is asked for, or with 0 bytes let go of; its number is that of `Handed`."""

    storage: int
    bytes: int


Entry: TypeAlias = Request | Moment


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
        self.entries: list[Entry] = []
        self.count = 0
        self.live = 0
        self.peak = 0

    def allocate(self, tensor: torch.Tensor, *, counts: bool = True) -> None:
        """A storage that the graph makes, unless it is known already."""
        if storage_of(tensor) not in self.known:
            size = self.rounded(tensor.untyped_storage().nbytes()) if counts else 0
            if size:
                self.entries.append(Request(self.count, size))
            self.enter(tensor, size)
            self.live += size
            self.peak = max(self.peak, self.live)

    def enter(self, tensor: torch.Tensor, size: int) -> None:
        self.known[storage_of(tensor)] = Handed(self.count, size)
        self.count += 1
        # The storage's own life is the count: no need to follow views, aliases and reuse by hand.
        weakref.finalize(tensor.untyped_storage(), self.leave, storage_of(tensor))

    def leave(self, key: int) -> None:
        gone = self.known.pop(key)
        if gone.bytes:
            self.entries.append(Request(gone.storage, 0))
        self.live -= gone.bytes
