"""What runs between the pieces of a step: the storages that it makes and reads, autograd's nodes of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from .._torch import edges_of, storage_key
from ..measuring.tracker import live_storages

__all__ = ["Gaps", "leaf_of", "nodes_between", "summed"]


class Gaps(live_storages):
    """Counts the storages that are made while no piece runs, and tells those that are read."""

    def __init__(
        self,
        device: torch.device,
        found: Callable[[torch.Tensor], None],
        read: Callable[[torch.Tensor], None],
    ) -> None:
        super().__init__(device)
        self.found, self.read = found, read
        self.away = True
        self.most = 0
        self.start = 0

    def call(self, operator: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return operator(*args, **kwargs) if self.away else super().call(operator, args, kwargs)

    def give(self, tensor: torch.Tensor) -> None:
        new = self.storage(tensor) is not None and storage_key(tensor) not in self.known
        super().give(tensor)
        if new:
            self.read(tensor)

    def make(self, tensor: torch.Tensor) -> None:
        new = self.storage(tensor) is not None and storage_key(tensor) not in self.known
        super().make(tensor)
        if new:
            self.found(tensor)

    def note_peak(self, beside: int = 0) -> None:
        self.most = max(self.most, self.made + beside)

    def begin(self) -> None:
        """What is there now was there before: a piece has run, and may have let go of something."""
        self.most = self.start = self.made

    def taken(self) -> int:
        """The most that was there at once since this was asked before, or a piece has run, above that."""
        taken = self.most - self.start
        self.begin()
        return max(taken, 0)


def leaf_of(node: Any) -> Any:
    """The node that adds up the gradients of a leaf; None for all others, which hold what was saved."""
    return node if hasattr(node, "variable") else None


def summed(nodes: Sequence[Any]) -> dict[Any, int]:
    """The results of nodes, not leaves, that several of these nodes give gradients for; each has a number."""
    edges = Counter(edge for node in nodes for edge in edges_of(node))
    several = (edge for edge, count in edges.items() if count > 1 and leaf_of(edge[0]) is None)
    return {edge: number for number, edge in enumerate(several)}


def nodes_between(tensors: Iterable[torch.Tensor], pieces: set[Any]) -> Iterator[Any]:
    """Autograd's nodes of a call that are not of a piece; leaves are left out."""
    stack: list[Any] = [tensor.grad_fn for tensor in tensors]
    met: set[Any] = set()
    while stack:
        node = stack.pop()
        if node is None or node in met:
            continue
        met.add(node)
        if node not in pieces and not hasattr(node, "variable"):
            yield node
        stack += [following for following, _ in node.next_functions]
