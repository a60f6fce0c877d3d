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
_SLICE, _MOST_SLICES = 2**22, 8
"""Large inputs are worked on in slices of at least so many numbers, in so many at most."""


class Rounded(Kind):
    """Stochastic rounding to 8 or 4 bits; k does not matter."""

    has_rate = False
    redraws = False

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.levels = 2**bits - 1

    def compress(self, x: torch.Tensor, seed: torch.Tensor, k: int, real: torch.Tensor | None = None) -> Kept:
        rows, features = x.shape
        least, step = self.scales(x)
        dither = _Dither(rows, features, seed, sum_dtype(x))

        def level(start: int, stop: int) -> torch.Tensor:
            place = _places(x[start:stop], least[start:stop], step[start:stop])
            place += dither(start, stop).view(place.shape)
            return place.floor_().clamp_(0, self.levels).to(torch.uint8).view(stop - start, features)

        if self.bits == 8:
            parts = [level(start, stop) for start, stop in _slices(rows, features)]
        else:
            half = (rows + 1) // 2
            parts = [
                _packed(level(start, stop), level(half + start, min(half + stop, rows)))
                for start, stop in _slices(half, features)
            ]
        return _joined(parts), least, step

    def weight_gradient(
        self, g: torch.Tensor, kept: Kept, seed: torch.Tensor, k: int, real: torch.Tensor | None = None
    ) -> torch.Tensor:
        level, least, step = kept
        rows, features = g.shape[0], level.shape[1]

        def numbers(start: int, level: torch.Tensor) -> torch.Tensor:
            stop = min(start + level.shape[0], rows)
            made = torch.addcmul(least[start:stop], _grouped(level[: stop - start]), step[start:stop])
            return made.view(stop - start, features).to(g.dtype)

        if g.dtype == least.dtype:  # what is made are the numbers themselves
            return g.t() @ numbers(0, level if self.bits == 8 else torch.cat([level & 15, level >> 4]))
        slices, half = _slices(level.shape[0], features), level.shape[0]
        if self.bits == 8:
            parts = [numbers(start, level[start:stop]) for start, stop in slices]
        else:
            parts = [numbers(start, level[start:stop] & 15) for start, stop in slices]
            parts += [numbers(half + start, level[start:stop] >> 4) for start, stop in slices]
        return g.t() @ _joined(parts)

    def scales(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The least value of each group, and the distance of its levels."""
        grouped = _grouped(x)
        least, most = (
            found.to(sum_dtype(x)) for found in (grouped.amin(2, keepdim=True), grouped.amax(2, keepdim=True))
        )
        return least, (most - least) / self.levels

    def kept_bytes(self, rows: int, features: int, k: int, dtype: torch.dtype) -> int:
        groups = rows * features // _group(features)
        scales = 2 * groups * torch.promote_types(dtype, torch.float32).itemsize
        return -(-rows * self.bits // 8) * features + scales

    def variance_law(self, x: torch.Tensor, g: torch.Tensor) -> Callable[[int], float]:
        """A number a fraction f above a level is off by step^2 f (1 - f) on average, on its own."""
        least, step = self.scales(x)
        place = _places(x, least, step)
        fraction = place - place.floor()
        off = (fraction * (1 - fraction) * step.square()).sum((1, 2), dtype=torch.float64)
        found = float(off @ g.square().sum(1, dtype=torch.float64))
        return lambda k: found


def _group(features: int) -> int:
    return _GROUP if features % _GROUP == 0 else features


def _grouped(x: torch.Tensor) -> torch.Tensor:
    rows, features = x.shape
    return x.reshape(rows, features // _group(features), _group(features))


def _places(x: torch.Tensor, least: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """Where each number lies among the levels of its group."""
    return (_grouped(x).to(least.dtype) - least) / torch.where(step > 0, step, 1)


def _slices(rows: int, features: int) -> list[tuple[int, int]]:
    """Where to begin and end, so that what is made on the way is small beside a large input."""
    count = max(1, min(_MOST_SLICES, rows * features // _SLICE))
    size = -(-rows // count) if rows else 1
    return [(start, min(start + size, rows)) for start in range(0, max(rows, 1), size)]


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class _Dither:
    """What decides on up or down, for some rows at a time."""

    def __init__(self, rows: int, features: int, seed: torch.Tensor, dtype: torch.dtype) -> None:
        self.of_rows, self.of_columns = (
            uniforms(torch.arange(n, device=seed.device), c, dtype)
            for n, c in ((rows, seed[0]), (features, seed[1]))
        )

    def __call__(self, start: int, stop: int) -> torch.Tensor:
        return (self.of_rows[start:stop].unsqueeze(1) + self.of_columns).frac_()


def _packed(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Two levels to a byte; there may be one row less of those above."""
    packed, above = low.clone(), high << 4
    packed[: above.shape[0]].bitwise_or_(above)
    return packed
