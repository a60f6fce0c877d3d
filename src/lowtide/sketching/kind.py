"""What a way of keeping less of a layer's input must say: what it keeps, and what becomes of the gradient."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

__all__ = ["Kept", "Kind", "Projection", "sum_dtype"]

Kept = tuple[torch.Tensor, ...]
"""The tensors that stand for a layer's input until its backward."""


class Kind(ABC):
    """A way to keep less of the rows of x and still form an unbiased weight gradient g^T x.

    All methods are pure functions: the same seed gives the same bits. `x` and `g` have two dimensions, rows
    first. `real` is an optional mask of the rows; of the others, the gradient is zero.
    `has_rate` says that k is free to choose, `redraws` that the backward needs the seed (and `real`) again,
    `leaves_out` that rows that are not real make no difference; otherwise they take part as zeros.
    """

    has_rate = True
    redraws = True
    leaves_out = True

    @abstractmethod
    def compress(self, x: torch.Tensor, seed: torch.Tensor, k: int, real: torch.Tensor | None = None) -> Kept:
        """What is kept of x."""

    @abstractmethod
    def weight_gradient(
        self, g: torch.Tensor, kept: Kept, seed: torch.Tensor, k: int, real: torch.Tensor | None = None
    ) -> torch.Tensor:
        """An estimate of g^T x that is right on average over seeds."""

    @abstractmethod
    def kept_bytes(self, rows: int, features: int, k: int, dtype: torch.dtype) -> int:
        """The bytes of what is kept, without the seed."""

    @abstractmethod
    def variance_law(self, x: torch.Tensor, g: torch.Tensor) -> Callable[[int], float]:
        """The expected squared distance of the estimate from g^T x, as a function of k; all rows are real."""

    def variance(self, x: torch.Tensor, g: torch.Tensor, k: int) -> float:
        """The same for one k and for the rows in the order in which they are."""
        return self.variance_law(x, g)(k)


class Projection(Kind):
    """A kind that keeps S^T x for a random matrix S of rows x k with E[S S^T] = 1."""

    @abstractmethod
    def project(self, x: torch.Tensor, seed: torch.Tensor, k: int, real: torch.Tensor | None) -> torch.Tensor:
        """S^T x, summed in single precision at least, in the dtype of x."""

    def compress(self, x: torch.Tensor, seed: torch.Tensor, k: int, real: torch.Tensor | None = None) -> Kept:
        return (self.project(x, seed, k, real),)

    def weight_gradient(
        self, g: torch.Tensor, kept: Kept, seed: torch.Tensor, k: int, real: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self.project(g, seed, k, real).t() @ kept[0]

    def kept_bytes(self, rows: int, features: int, k: int, dtype: torch.dtype) -> int:
        return k * features * dtype.itemsize


def sum_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype in which a sketch of x is summed."""
    return torch.promote_types(x.dtype, torch.float32)
