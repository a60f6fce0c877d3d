"""Sketches by a full matrix S: Gaussian, Rademacher, and rows of the cosine and Hadamard transforms.

These are the paper's, for comparison. S is made in blocks of rows from the seed and used up at once; it is
never in memory as a whole. The two transforms are not run: k of their outputs are wanted, which a product
with k of their rows gives.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable

import torch

from .draw import chosen, normals, signs
from .kind import Projection, sum_dtype
from .moments import moments

__all__ = ["Cosine", "Gaussian", "Hadamard", "Rademacher"]

_BLOCK = 2**20
"""As many elements of S are made at once."""


class Dense(Projection):
    """A sketch whose matrix S is made in blocks of its rows."""

    @abstractmethod
    def block(
        self, index: torch.Tensor, rows: int, k: int, seed: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """The rows of S at the given indices (a column), times the root of k."""

    def project(self, x: torch.Tensor, seed: torch.Tensor, k: int, real: torch.Tensor | None) -> torch.Tensor:
        rows, features = x.shape
        total = x.new_zeros(k, features, dtype=sum_dtype(x))
        several = max(1, _BLOCK // k)
        for start in range(0, rows, several):
            stop = min(start + several, rows)
            index = torch.arange(start, stop, device=x.device).unsqueeze(1)
            matrix = self.block(index, rows, k, seed, total.dtype)
            matrix = matrix if real is None else matrix * real[start:stop].unsqueeze(1)
            total.addmm_(matrix.t(), x[start:stop].to(total.dtype))
        return total.mul_(1 / math.sqrt(k)).to(x.dtype)


class Gaussian(Dense):
    """Independent normal numbers."""

    def block(
        self, index: torch.Tensor, rows: int, k: int, seed: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        return normals(_cells(index, k), seed, dtype)

    def variance_law(self, x: torch.Tensor, g: torch.Tensor) -> Callable[[int], float]:
        found = moments(x, g)
        return lambda k: (found.a + found.c) / k


class Rademacher(Dense):
    """Independent signs."""

    def block(
        self, index: torch.Tensor, rows: int, k: int, seed: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        return signs(_cells(index, k), seed, dtype)

    def variance_law(self, x: torch.Tensor, g: torch.Tensor) -> Callable[[int], float]:
        found = moments(x, g)
        return lambda k: found.signed / k


class Cosine(Dense):
    """k outputs, chosen without replacement, of a discrete cosine transform of rows with random signs."""

    leaves_out = False

    def block(
        self, index: torch.Tensor, rows: int, k: int, seed: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        frequency = chosen(rows, k, seed)
        phase = (2 * index + 1) * frequency % (4 * rows)
        height = torch.where(frequency == 0, 1.0, 2**0.5)
        wave = torch.cos(phase.to(dtype) * (torch.pi / (2 * rows))) * height
        return wave.to(dtype) * signs(index, seed, dtype)

    def variance_law(self, x: torch.Tensor, g: torch.Tensor) -> Callable[[int], float]:
        """To order 1 / rows: two rows as far from the first as from the last meet half as often again."""
        return _subsampled(x, g, x.shape[0])


class Hadamard(Dense):
    """k outputs, chosen without replacement, of a Hadamard transform of rows with random signs.

    The transform has a power of two as its length; rows of zeros stand for those that are missing.
    """

    leaves_out = False

    def block(
        self, index: torch.Tensor, rows: int, k: int, seed: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        common = index & chosen(_power(rows), k, seed)
        for shift in (16, 8, 4, 2, 1):
            common = common ^ (common >> shift)
        return torch.rsub(common & 1, 1, alpha=2).to(dtype) * signs(index, seed, dtype)

    def variance_law(self, x: torch.Tensor, g: torch.Tensor) -> Callable[[int], float]:
        return _subsampled(x, g, _power(x.shape[0]))


def _cells(index: torch.Tensor, k: int) -> torch.Tensor:
    """A number for each cell of some rows of S; they wrap after 2^31 - 1, never within a column."""
    return (index * k + torch.arange(k, device=index.device)) % (2**31 - 1)


def _power(rows: int) -> int:
    """The least power of two that is not below."""
    return 1 << (rows - 1).bit_length()


def _subsampled(x: torch.Tensor, g: torch.Tensor, length: int) -> Callable[[int], float]:
    """The variance of k of the outputs of an orthogonal transform of some length."""
    found = moments(x, g)
    return lambda k: max(0.0, length / k - 1) / max(length - 1, 1) * found.signed
