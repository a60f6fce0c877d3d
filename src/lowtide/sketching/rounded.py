"""Every row, in 8 or 4 bits, rounded up or down at random so that each number is right on average.

Columns of a row are grouped (256 at a time where that divides them); a group keeps its least value and the
distance of two levels, and each number its level (ActNN, Chen et al. 2021). The numbers that decide on up or
down are the fractional parts of u_i + v_j, for uniform u of the rows and v of the columns: any two of them
are independent, which is all that the variance needs, and there are rows + columns to draw, not their
product.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .draw import uniforms
from .kind import Kept, Kind, sum_dtype

__all__ = ["Rounded"]

_GROUP = 256


class Rounded(Kind):
    """Stochastic rounding to 8 or 4 bits; k does not matter."""

    has_rate = False
    redraws = False

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.levels = 2**bits - 1

    def compress(self, x: torch.Tensor, seed: torch.Tensor, k: int, real: torch.Tensor | None = None) -> Kept:
        place, least, step = self.places(x)
        place += _dither(x.shape[0], x.shape[1], seed, place.dtype).view(place.shape)
        level = place.floor_().clamp_(0, self.levels).to(torch.uint8).view(x.shape)
        return (_packed(level) if self.bits == 4 else level), least, step

    def weight_gradient(
        self, g: torch.Tensor, kept: Kept, seed: torch.Tensor, k: int, real: torch.Tensor | None = None
    ) -> torch.Tensor:
        level, least, step = kept
        rows, features = g.shape[0], level.shape[1]
        level = _unpacked(level, rows) if self.bits == 4 else level
        x = torch.addcmul(least, level.view(rows, -1, _group(features)), step)
        return g.t() @ x.view(rows, features).to(g.dtype)

    def places(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Where each number lies among the levels of its group, and the least value and step of each."""
        rows, features = x.shape
        grouped = x.reshape(rows, -1, _group(features)).to(sum_dtype(x))
        least = grouped.amin(2, keepdim=True)
        step = (grouped.amax(2, keepdim=True) - least) / self.levels
        return (grouped - least) / torch.where(step > 0, step, 1), least, step

    def kept_bytes(self, rows: int, features: int, k: int, dtype: torch.dtype) -> int:
        groups = rows * features // _group(features)
        scales = 2 * groups * torch.promote_types(dtype, torch.float32).itemsize
        return -(-rows * self.bits // 8) * features + scales

    def variance_law(self, x: torch.Tensor, g: torch.Tensor) -> Callable[[int], float]:
        """A number a fraction f above a level is off by step^2 f (1 - f) on average, on its own."""
        place, _, step = self.places(x)
        fraction = place - place.floor()
        off = (fraction * (1 - fraction) * step.square()).sum((1, 2), dtype=torch.float64)
        found = float(off @ g.square().sum(1, dtype=torch.float64))
        return lambda k: found


def _group(features: int) -> int:
    return _GROUP if features % _GROUP == 0 else features


def _dither(rows: int, features: int, seed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    of_rows, of_columns = (
        uniforms(torch.arange(n, device=seed.device), c, dtype)
        for n, c in ((rows, seed[0]), (features, seed[1]))
    )
    return (of_rows.unsqueeze(1) + of_columns).frac_()


def _packed(level: torch.Tensor) -> torch.Tensor:
    """Two levels to a byte: those of the first half of the rows below, of the second above."""
    half = (level.shape[0] + 1) // 2
    packed, above = level[:half].clone(), level[half:] << 4
    packed[: above.shape[0]].bitwise_or_(above)
    return packed


def _unpacked(packed: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.cat([packed & 15, packed >> 4])[:rows]
