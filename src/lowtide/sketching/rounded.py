"""Every row, in 8 or 4 bits, rounded up or down at random so that each number is right on average.

Columns of a row are grouped (256 at a time where that divides them); a group keeps its least value and the
distance of two levels, and each number its level (ActNN, Chen et al. 2021). The numbers that decide on up or
down are the fractional parts of u_i + v_j, for uniform u of the rows and v of the columns: any two of them
are independent, which is all that the variance needs, and there are rows + columns to draw, not their
product.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .draw import uniforms
from .kind import Kept, Kind, sum_dtype
from .operators import have_kernels, operator

__all__ = ["Rounded"]

_GROUP = 256
_SLICE, _MOST_SLICES = 2**22, 8
"""Large inputs are worked on in slices: the least numbers in one, and the most slices."""


class Rounded(Kind):
    """Stochastic rounding to 8 or 4 bits; k does not matter."""

    has_rate = False
    redraws = False

    def __init__(self, bits: int) -> None:
        self.bits = bits

    def compress(self, x: torch.Tensor, seed: torch.Tensor, k: int, real: torch.Tensor | None = None) -> Kept:
        round_off = _round_off_at_once if have_kernels(x) else _round_off
        return tuple(round_off(x, seed, self.bits, _group(x.shape[1])))

    def weight_gradient(
        self, g: torch.Tensor, kept: Kept, seed: torch.Tensor, k: int, real: torch.Tensor | None = None
    ) -> torch.Tensor:
        levels, least, step = kept
        widen = _widen_at_once if have_kernels(g) else _widen
        return g.t() @ widen(levels, least, step, self.bits, g.dtype)

    def kept_bytes(self, rows: int, features: int, k: int, dtype: torch.dtype) -> int:
        groups = rows * features // _group(features)
        scales = 2 * groups * torch.promote_types(dtype, torch.float32).itemsize
        return -(-rows * self.bits // 8) * features + scales

    def variance_law(self, x: torch.Tensor, g: torch.Tensor) -> Callable[[int], float]:
        """A number a fraction f above a level is off by step^2 f (1 - f) on average, on its own."""
        grouped = _grouped(x, _group(x.shape[1]))
        least, step = _scales(grouped, self.bits)
        place = _places(grouped, least, step)
        fraction = place - place.floor()
        off = (fraction * (1 - fraction) * step.square()).sum((1, 2), dtype=torch.float64)
        found = float(off @ g.square().sum(1, dtype=torch.float64))
        return lambda k: found


def _round_off(
    x: torch.Tensor, seed: torch.Tensor, bits: int, group: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The levels of the numbers of x, and the least value and the step of each group of columns."""
    rows, features = x.shape
    least, step = _scales(_grouped(x, group), bits)
    dither = _Dither(rows, features, seed, sum_dtype(x))

    def level(start: int, stop: int) -> torch.Tensor:
        place = _places(_grouped(x[start:stop], group), least[start:stop], step[start:stop])
        place += dither(start, stop).view(place.shape)
        return place.floor_().clamp_(0, _levels(bits)).to(torch.uint8).view(stop - start, features)

    if bits == 8:
        return _joined([level(start, stop) for start, stop in _slices(rows, features)]), least, step
    half = (rows + 1) // 2
    parts = [
        _packed(level(start, stop), level(half + start, min(half + stop, rows)))
        for start, stop in _slices(half, features)
    ]
    return _joined(parts), least, step


def _widen(
    levels: torch.Tensor, least: torch.Tensor, step: torch.Tensor, bits: int, dtype: torch.dtype
) -> torch.Tensor:
    """The numbers that levels stand for."""
    rows, (packed, features) = least.shape[0], levels.shape
    group = features // least.shape[1]

    def numbers(start: int, level: torch.Tensor) -> torch.Tensor:
        stop = min(start + level.shape[0], rows)
        made = torch.addcmul(least[start:stop], _grouped(level[: stop - start], group), step[start:stop])
        return made.view(stop - start, features).to(dtype)

    if dtype == least.dtype:  # what is made are the numbers themselves
        return numbers(0, levels if bits == 8 else torch.cat([levels & 15, levels >> 4]))
    slices = _slices(packed, features)
    if bits == 8:
        return _joined([numbers(start, levels[start:stop]) for start, stop in slices])
    low = [numbers(start, levels[start:stop] & 15) for start, stop in slices]
    high = [numbers(packed + start, levels[start:stop] >> 4) for start, stop in slices]
    return _joined([*low, *high])


def _empty_levels(x: torch.Tensor, seed: torch.Tensor, bits: int, group: int) -> tuple[torch.Tensor, ...]:
    rows, features = x.shape
    scales = (x.new_empty(rows, features // group, 1, dtype=sum_dtype(x)) for _ in range(2))
    return x.new_empty(-(-rows * bits // 8), features, dtype=torch.uint8), *scales


def _empty_numbers(
    levels: Any, least: torch.Tensor, step: Any, bits: int, dtype: torch.dtype
) -> torch.Tensor:
    return least.new_empty(least.shape[0], levels.shape[1], dtype=dtype)


_round_off_at_once = operator(
    "round_off",
    "(Tensor x, Tensor seed, int bits, int group) -> (Tensor, Tensor, Tensor)",
    _round_off,
    _empty_levels,
)
_widen_at_once = operator(
    "widen",
    "(Tensor levels, Tensor least, Tensor step, int bits, ScalarType dtype) -> Tensor",
    _widen,
    _empty_numbers,
)


def _levels(bits: int) -> int:
    """The highest level; the lowest is 0."""
    return int(2**bits - 1)


def _scales(grouped: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The least value of each group, and the distance of its levels."""
    number = sum_dtype(grouped)
    least, most = (find(2, keepdim=True).to(number) for find in (grouped.amin, grouped.amax))
    return least, (most - least) * (1 / _levels(bits))


def _group(features: int) -> int:
    return _GROUP if features % _GROUP == 0 else features


def _grouped(x: torch.Tensor, group: int) -> torch.Tensor:
    rows, features = x.shape
    return x.reshape(rows, features // group, group)


def _places(grouped: torch.Tensor, least: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """Where each number lies among the levels of its group."""
    return (grouped.to(least.dtype) - least) * torch.where(step > 0, step, 1).reciprocal()


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
