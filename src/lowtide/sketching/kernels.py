"""The sketches that are worth it on a GPU as one kernel each, in Triton, which comes with torch there.

They give the bits of the plain operators in `strided` and `rounded`: the same hashes, sums in the same order
(up to sixteen rows a bucket), divisions as torch rounds them. What they spare is launches, some twenty for
each sketch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["deal", "round_off", "widen"]

_PRIME = tl.constexpr(2**31 - 1)
_TILE = 1024
"""Numbers that one program works on at a time."""


def deal(
    x: torch.Tensor,
    seed: torch.Tensor,
    k: int,
    order: torch.Tensor | None,
    real: torch.Tensor | None,
    buckets: torch.Tensor,
) -> None:
    """Add the rows in some order to k buckets in turn, with signs; those that are not real as zeros."""
    rows, features = x.shape
    several, tile = _shape_of_tile(min(features, 256))
    with torch.cuda.device_of(x):
        _deal[triton.cdiv(k, several), triton.cdiv(features, tile)](
            x, seed, order, real, buckets, rows, features, k, *x.stride(),
            ordered=order is not None, wide=x.dtype == torch.float64, several=several, tile=tile,
        )  # fmt: skip


def round_off(
    x: torch.Tensor, seed: torch.Tensor, bits: int, group: int, made: tuple[torch.Tensor, ...]
) -> None:
    """Write the levels of the numbers of x, and the least value and the step of each group of columns."""
    levels, least, step = made
    (rows, features), packed = x.shape, levels.shape[0]
    several, tile = _shape_of_tile(group, 4 * _TILE)  # as the hashes of columns serve all rows of a tile
    with torch.cuda.device_of(x):
        _round_off[triton.cdiv(packed, several), features // group](
            x, seed, levels, least, step, rows, packed, features, group, *x.stride(),
            bits=bits, wide=least.dtype == torch.float64, several=several, tile=tile,
            enable_fp_fusion=False,  # which would round a place once where torch rounds it twice
        )  # fmt: skip


def widen(
    levels: torch.Tensor,
    least: torch.Tensor,
    step: torch.Tensor,
    bits: int,
    dtype: torch.dtype,
    numbers: torch.Tensor,
) -> None:
    """Write the numbers that levels stand for."""
    levels, least, step = (part.contiguous() for part in (levels, least, step))
    (rows, groups, _), (packed, features) = least.shape, levels.shape
    several, tile = _shape_of_tile(min(features, 256))
    with torch.cuda.device_of(levels):
        _widen[triton.cdiv(packed, several), triton.cdiv(features, tile)](
            levels, least, step, numbers, rows, packed, features, features // groups,
            bits=bits, several=several, tile=tile,
        )  # fmt: skip


def _shape_of_tile(columns: int, size: int = _TILE) -> tuple[int, int]:
    """Powers of two: as many columns as are wanted, or a few more, and rows to fill the tile."""
    wide = int(triton.next_power_of_2(columns))
    return max(1, size // wide), wide


@triton.jit
def _next(index, value, coefficient):
    """`coefficient + index * value` modulo 2^31 - 1, of numbers below it, without a division."""
    wide = index.to(tl.uint32).to(tl.uint64) * value.to(tl.uint32).to(tl.uint64) + coefficient.to(tl.uint64)
    folded = ((wide & _PRIME) + (wide >> 31)).to(tl.uint32)
    folded = (folded & _PRIME) + (folded >> 31)
    return tl.where(folded >= _PRIME, folded - _PRIME, folded)


@triton.jit
def _hashed(index, coefficients):
    """The value of a polynomial at each index, as in `draw`."""
    value = _next(index, tl.load(coefficients), tl.load(coefficients + 1))
    value = _next(index, value, tl.load(coefficients + 2))
    return _next(index, value, tl.load(coefficients + 3))


@triton.jit
def _deal(
    x,
    seed,
    order,
    real,
    buckets,
    rows,
    features,
    k,
    row_step,
    column_step,
    ordered: tl.constexpr,
    wide: tl.constexpr,
    several: tl.constexpr,
    tile: tl.constexpr,
):
    number: tl.constexpr = tl.float64 if wide else tl.float32
    bucket = tl.program_id(0).to(tl.int64) * several + tl.arange(0, several)
    column = tl.program_id(1).to(tl.int64) * tile + tl.arange(0, tile)
    total = tl.zeros((several, tile), number)
    for start in range(0, rows, k):
        index = bucket + start
        inside = (bucket < k) & (index < rows)
        factor = 1 - 2 * (_hashed(index, seed) & 1).to(number)
        row = index
        if ordered:
            row = tl.load(order + index, mask=inside, other=0)
            factor = factor * tl.load(real + row, mask=inside, other=0).to(number)
        at = x + row[:, None] * row_step + column[None] * column_step
        part = tl.load(at, mask=inside[:, None] & (column < features)[None], other=0)
        total += part.to(number) * factor[:, None]
    at = buckets + bucket[:, None] * features + column[None]
    tl.store(at, total.to(buckets.dtype.element_ty), mask=(bucket < k)[:, None] & (column < features)[None])


@triton.jit
def _uniform(index, coefficients, number: tl.constexpr):
    return (_hashed(index, coefficients).to(number) + 0.5) * tl.full((1,), 1 / _PRIME, number)


@triton.jit
def _inverse(number):
    """Rounded as torch rounds it; Triton's own division of single precision is not."""
    one = tl.full((1,), 1, number.dtype)
    return one / number if number.dtype == tl.float64 else tl.div_rn(one, number)


@triton.jit
def _levels(
    x,
    seed,
    least,
    step,
    row,
    inside,
    column,
    features,
    group,
    row_step,
    column_step,
    most: tl.constexpr,
    number: tl.constexpr,
):
    """The levels of some rows of one group, whose scales are stored."""
    here = inside[:, None] & (column < group)[None]
    first = tl.program_id(1).to(tl.int64) * group
    at = x + row[:, None] * row_step + (first + column)[None] * column_step
    part = tl.load(at, mask=here, other=0).to(number)
    low = tl.min(tl.where(here, part, float("inf")), 1)
    high = tl.max(tl.where(here, part, float("-inf")), 1)
    distance = (high - low) * tl.full((1,), 1 / most, number)
    scale = row * (features // group) + tl.program_id(1)
    tl.store(least + scale, low, mask=inside)
    tl.store(step + scale, distance, mask=inside)
    place = (part - low[:, None]) * _inverse(tl.where(distance > 0, distance, 1))[:, None]
    dither = _uniform(row, seed, number)[:, None] + _uniform(first + column, seed + 4, number)[None]
    level = tl.floor(place + (dither - tl.floor(dither)))
    return tl.minimum(tl.maximum(level, 0), most).to(tl.uint8)


@triton.jit
def _round_off(
    x,
    seed,
    levels,
    least,
    step,
    rows,
    packed,
    features,
    group,
    row_step,
    column_step,
    bits: tl.constexpr,
    wide: tl.constexpr,
    several: tl.constexpr,
    tile: tl.constexpr,
):
    number: tl.constexpr = tl.float64 if wide else tl.float32
    most: tl.constexpr = 2**bits - 1
    row = tl.program_id(0).to(tl.int64) * several + tl.arange(0, several)
    column = tl.arange(0, tile)
    byte = _levels(
        x, seed, least, step, row, row < packed, column, features, group, row_step, column_step, most, number
    )
    if bits == 4:
        above = row + packed
        high = _levels(
            x, seed, least, step, above, (row < packed) & (above < rows), column, features, group, row_step,
            column_step, most, number,
        )  # fmt: skip
        byte = byte | tl.where((above < rows)[:, None], high << 4, 0).to(tl.uint8)
    at = levels + row[:, None] * features + tl.program_id(1).to(tl.int64) * group + column[None]
    tl.store(at, byte, mask=(row < packed)[:, None] & (column < group)[None])


@triton.jit
def _widen(
    levels,
    least,
    step,
    numbers,
    rows,
    packed,
    features,
    group,
    bits: tl.constexpr,
    several: tl.constexpr,
    tile: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * several + tl.arange(0, several)
    column = tl.program_id(1).to(tl.int64) * tile + tl.arange(0, tile)
    here = (row < packed)[:, None] & (column < features)[None]
    byte = tl.load(levels + row[:, None] * features + column[None], mask=here, other=0)
    _write(byte & 15 if bits == 4 else byte, row, column, here, least, step, numbers, features, group)
    if bits == 4:
        above = row + packed
        here = here & (above < rows)[:, None]
        _write(byte >> 4, above, column, here, least, step, numbers, features, group)


@triton.jit
def _write(
    level,
    row,
    column,
    here,
    least,
    step,
    numbers,
    features,
    group,
):
    scale = row[:, None] * (features // group) + (column // group)[None]
    low = tl.load(least + scale, mask=here, other=0)
    distance = tl.load(step + scale, mask=here, other=0)
    number = low + level.to(low.dtype) * distance
    tl.store(numbers + row[:, None] * features + column[None], number.to(numbers.dtype.element_ty), mask=here)
