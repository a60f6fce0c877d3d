"""Some of the rows, as they are: chosen uniformly without replacement, or by their norms with replacement."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .draw import chosen, uniforms
from .kind import Kept, Kind, sum_dtype
from .moments import moments

__all__ = ["Rows", "RowsByNorm"]


class Rows(Kind):
    """k rows without replacement, each as likely as any other; the gradient is scaled up."""

    def compress(self, x: torch.Tensor, seed: torch.Tensor, k: int, real: torch.Tensor | None = None) -> Kept:
        return (x.index_select(0, chosen(x.shape[0], k, seed, real)),)

    def weight_gradient(
        self, g: torch.Tensor, kept: Kept, seed: torch.Tensor, k: int, real: torch.Tensor | None = None
    ) -> torch.Tensor:
        rows = g.shape[0]
        scale = rows / k if real is None else real.sum().clamp(min=k) / k
        return g.index_select(0, chosen(rows, k, seed, real)).t() @ kept[0] * scale

    def kept_bytes(self, rows: int, features: int, k: int, dtype: torch.dtype) -> int:
        return k * features * dtype.itemsize

    def variance_law(self, x: torch.Tensor, g: torch.Tensor) -> Callable[[int], float]:
        found = moments(x, g)
        rows = found.rows
        return lambda k: max(0.0, rows / k - 1) * found.own  # (B/k - 1) B/(B-1) (D - C/B)


class RowsByNorm(Kind):
    """k rows with replacement, as likely as |x_i|^2 is large, scaled so that they are right on average.

    The choice depends on x, so the indices are kept beside the rows.
    """

    redraws = False

    def compress(self, x: torch.Tensor, seed: torch.Tensor, k: int, real: torch.Tensor | None = None) -> Kept:
        share = x.to(sum_dtype(x)).square().sum(1, dtype=torch.float64)
        share = share if real is None else share * real
        reached = share.cumsum(0)
        drawn = uniforms(torch.arange(k, device=x.device), seed[0], torch.float64) * reached[-1]
        index = torch.searchsorted(reached, drawn, right=True).clamp(max=x.shape[0] - 1)
        found = share[index]
        scale = torch.where(found > 0, reached[-1] / (k * found), 0)
        return (x.index_select(0, index) * scale.unsqueeze(1)).to(x.dtype), index

    def weight_gradient(
        self, g: torch.Tensor, kept: Kept, seed: torch.Tensor, k: int, real: torch.Tensor | None = None
    ) -> torch.Tensor:
        return g.index_select(0, kept[1]).t() @ kept[0]

    def kept_bytes(self, rows: int, features: int, k: int, dtype: torch.dtype) -> int:
        return k * (features * dtype.itemsize + torch.int64.itemsize)

    def variance_law(self, x: torch.Tensor, g: torch.Tensor) -> Callable[[int], float]:
        found = moments(x, g)
        return lambda k: max(0.0, found.a - found.c) / k
