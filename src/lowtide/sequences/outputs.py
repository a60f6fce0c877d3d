"""Where the outputs of a scan go: stacked over time, or folded into one value as they come.

In the forward each piece is written once, when its unit runs for the first time. In the backward every piece
is asked for its gradient, from the gradient of what came of all of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

from ..errors import LowtideError
from .record import Gradients
from .sequence import Piece, Place, differentiable, say_leaf

__all__ = ["REDUCTIONS", "Last", "Outputs", "Stacked", "Summed", "check_alike", "make_outputs"]

REDUCTIONS = ("sum", "mean", "last")


class Outputs(ABC):
    """The outputs of all steps."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.values: list[Any] = []

    def write(self, piece: Piece) -> None:
        """Take in a piece whose unit has run for the first time."""
        if not self.values:
            self.values = [self.begin(leaf) for leaf in piece.leaves]
        for number, leaf in enumerate(piece.leaves):
            self.values[number] = self.add(self.values[number], leaf, piece.place)

    def finish(self) -> list[Any]:
        """What came of them."""
        return self.values

    @abstractmethod
    def begin(self, leaf: Any) -> Any: ...

    @abstractmethod
    def add(self, value: Any, leaf: Any, place: Place) -> Any: ...

    def shared(self, totals: Gradients) -> Gradients:
        """What the gradients of the pieces are made from, given those of the whole."""
        return totals

    @abstractmethod
    def gradient(self, total: torch.Tensor | None, place: Place) -> torch.Tensor | None:
        """The gradient of a piece, from what they share."""

    def gradients(self, totals: Gradients, place: Place) -> Gradients:
        """The gradients of the leaves of a piece."""
        return [self.gradient(total, place) for total in totals]


class Stacked(Outputs):
    """All outputs, stacked over time; written in place, so that no second copy is ever there."""

    def begin(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            raise LowtideError(
                f"the cell's output holds {say_leaf(leaf)}; only tensors and None can be stacked"
            )
        return leaf.new_empty((self.length, *self.shape(leaf)))

    def shape(self, leaf: torch.Tensor) -> torch.Size:
        return leaf.shape

    def add(self, value: Any, leaf: Any, place: Place) -> Any:
        if self.shape(leaf) != value.shape[1:] or leaf.dtype != value.dtype:
            raise LowtideError(
                f"the cell's output changed from {say_leaf(value[0])} to {say_leaf(leaf)}; outputs are "
                "stacked, so they must be alike, or be folded with reduce="
            )
        value[place].copy_(leaf)
        return value

    def gradient(self, total: torch.Tensor | None, place: Place) -> torch.Tensor | None:
        return None if total is None else total[place]


def check_alike(one: torch.Tensor, other: torch.Tensor) -> None:
    """Refuse outputs that change their shape or dtype from step to step."""
    if one.shape != other.shape or one.dtype != other.dtype:
        raise LowtideError(
            f"the cell's output changed from {say_leaf(one)} to {say_leaf(other)}; the outputs of all steps "
            'must be alike, unless reduce="last" takes the last one'
        )


class Blocks(Stacked):
    """Outputs that come in blocks over time."""

    def shape(self, leaf: torch.Tensor) -> torch.Size:
        return leaf.shape[1:]


class Summed(Outputs):
    """The sum of all outputs, or their mean."""

    def __init__(self, length: int, scale: float | None = None) -> None:
        super().__init__(length)
        self.scale = scale

    def begin(self, leaf: Any) -> Any:
        if not differentiable(leaf):
            raise LowtideError(f"the cell's output holds {say_leaf(leaf)}, which cannot be summed")
        return None

    def add(self, value: Any, leaf: Any, place: Place) -> Any:
        if value is None:
            return leaf.clone()
        check_alike(value, leaf)
        return value.add_(leaf)

    def finish(self) -> list[Any]:
        return self.values if self.scale is None else [value.mul_(self.scale) for value in self.values]

    def shared(self, totals: Gradients) -> Gradients:
        if self.scale is None:
            return totals
        return [None if total is None else total * self.scale for total in totals]

    def gradient(self, total: torch.Tensor | None, place: Place) -> torch.Tensor | None:
        return total


class Last(Outputs):
    """The output of the last step that runs."""

    def __init__(self, length: int, place: Place) -> None:
        super().__init__(length)
        self.place = place

    def begin(self, leaf: Any) -> Any:
        return leaf

    def add(self, value: Any, leaf: Any, place: Place) -> Any:
        return leaf

    def gradient(self, total: torch.Tensor | None, place: Place) -> torch.Tensor | None:
        return total if place == self.place else None


def make_outputs(reduce: str | None, length: int, *, reverse: bool) -> Outputs:
    """The outputs for a way to reduce them; refuses one that is not known."""
    if reduce is None:
        return Stacked(length)
    if reduce not in REDUCTIONS:
        raise LowtideError(
            f"reduce={reduce!r} is not known; choose one of {', '.join(REDUCTIONS)} or a pair "
            "(function, start)"
        )
    if reduce == "last":
        return Last(length, 0 if reverse else length - 1)
    return Summed(length, None if reduce == "sum" else 1 / length)
