"""Cuts that hold for all whole numbers of a programme, though not for the parts between them.

Problem: half of a value takes half of its bytes, so with parts of values a row of bytes says too little.

Method: mixed-integer rounding (Nemhauser and Wolsey 1990; the divisors of Marchand and Wolsey 2001). In a row
Σ a x ≤ b, columns that are near 1 are replaced by 1 - x. For any divisor d with f = b mod d > 0

    Σ (⌊a / d⌋ + max(0, (a mod d) - f) / (d - f)) x ≤ ⌊b / d⌋

holds for all whole x ≥ 0. It is tried with the sizes of the columns that are parts, and the cut that these
parts violate most is taken. Multiplied by d - f it has whole numbers only, so nothing is rounded off.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from .programme import Row

__all__ = ["rounded", "violated"]

PART = 1e-5
"""Columns that are nearer to a whole number are taken for it."""

DIVISORS = 12


def violated(row: Row, point: Sequence[float]) -> Row | None:
    """The rounding of a row that a point violates most, if it violates one."""
    best, most = None, PART
    for cut in _roundings(row, point):
        over = sum(a * point[j] for j, a in cut.factors.items()) - cut.most
        length = sum(float(a) ** 2 for a in cut.factors.values()) ** 0.5
        if over > most * length:
            best, most = cut, over / length
    return best


def _roundings(row: Row, point: Sequence[float]) -> Iterator[Row]:
    parts = sorted({abs(a) for j, a in row.factors.items() if PART < point[j] < 1 - PART}, reverse=True)
    near = {j for j in row.factors if point[j] > 0.5}
    sizes = parts[:DIVISORS]
    for turned in (near, set(), set(row.factors)):
        for divisor in dict.fromkeys(d for size in sizes for d in (size, size // 2, 2 * size, size + 1)):
            cut = rounded(row, divisor, turned)
            if cut is not None:
                yield cut


def rounded(row: Row, divisor: int, turned: Iterable[int]) -> Row | None:
    """The row, rounded with a divisor after `turned` columns x became 1 - x; None where that says nothing."""
    turned = row.factors.keys() & turned
    most = row.most - sum(row.factors[j] for j in turned)
    if divisor < 1 or not most % divisor:
        return None
    whole, part = divmod(most, divisor)
    unit = divisor - part
    factors, least = {}, whole * unit
    for j, a in row.factors.items():
        count, rest = divmod(-a if j in turned else a, divisor)
        factor = count * unit + max(0, rest - part)
        if factor:
            factors[j] = -factor if j in turned else factor
            least -= factor if j in turned else 0
    return Row(factors, least) if factors else None
