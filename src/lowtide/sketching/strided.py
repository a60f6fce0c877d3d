"""Signed strided buckets: row i is added to bucket i modulo k, with a random sign.

No matrix S and no product with one: the rows are read once and added up, which a compiler fuses into a single
pass. It is a CountSketch (Charikar et al. 2002) whose buckets are dealt in turn: a bucket never gets two
rows more than another, so there are fewer collisions, and none when k is the number of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from .draw import signs
from .kind import Projection, sum_dtype
from .moments import moments
from .operators import have_kernels, operator

__all__ = ["Strided"]

_MOST_BLOCKS = 16
"""The most blocks in which rows are added: a graph stays short, and a product with signs stays small."""


class Strided(Projection):
    """Signed strided buckets."""

    def project(self, x: torch.Tensor, seed: torch.Tensor, k: int, real: torch.Tensor | None) -> torch.Tensor:
        # the real rows first, so that they are dealt to the buckets among themselves
        order = None if real is None else real.logical_not().argsort(stable=True)
        deal = _deal_at_once if have_kernels(x) else _deal
        return deal(x, seed, k, order, real)  # type: ignore[no-any-return]

    def variance_law(self, x: torch.Tensor, g: torch.Tensor) -> Callable[[int], float]:
        """The mean over the orders in which the rows may come: which of them meet depends on it."""
        found = moments(x, g)

        def law(k: int) -> float:
            return meetings(found.rows, k) * found.signed

        return law

    def variance(self, x: torch.Tensor, g: torch.Tensor, k: int) -> float:
        """The sum over buckets of what A + C - 2 D is for their own rows."""
        of_x, of_g = (_buckets(t.to(sum_dtype(t)), k) for t in (x, g))
        products = (of_x @ of_x.mT) * (of_g @ of_g.mT)
        norms = [t.square().sum(2, dtype=torch.float64) for t in (of_x, of_g)]
        a = (norms[0].sum(1) * norms[1].sum(1)).sum()
        return float(a + products.sum(dtype=torch.float64) - 2 * (norms[0] * norms[1]).sum())


def _buckets(x: torch.Tensor, k: int) -> torch.Tensor:
    """The rows of each bucket, with rows of zeros where there is one less."""
    missing = -x.shape[0] % k
    return functional.pad(x, (0, 0, 0, missing)).view(-1, k, x.shape[1]).transpose(0, 1)


def meetings(rows: int, k: int) -> float:
    """How likely two rows are to be in one bucket: (rows / k - 1) / (rows - 1) where k divides them."""
    turns, rest = divmod(rows, k)
    pairs = rest * (turns + 1) * turns + (k - rest) * turns * (turns - 1)
    return pairs / (rows * (rows - 1)) if rows > 1 else 0.0


def _deal(
    x: torch.Tensor, seed: torch.Tensor, k: int, order: torch.Tensor | None, real: torch.Tensor | None
) -> torch.Tensor:
    """The rows in some order added to k buckets in turn, with signs; those that are not real as zeros."""
    rows, features = x.shape
    factors = signs(torch.arange(rows, device=x.device), seed, sum_dtype(x))
    if real is not None:
        factors = factors * real[order]
    total = x.new_zeros(k, features, dtype=sum_dtype(x))
    block = k * -(-rows // (k * _MOST_BLOCKS))
    for start in range(0, rows, block):
        stop = min(start + block, rows)
        part = x[start:stop] if order is None else x.index_select(0, order[start:stop])
        _add(total, part, factors[start:stop].unsqueeze(1))
    return total.to(x.dtype)


def _add(total: torch.Tensor, part: torch.Tensor, factors: torch.Tensor) -> None:
    """Add rows to the buckets: whole turns at once, then what is left."""
    k, features = total.shape
    whole = part.shape[0] // k * k
    if part.shape[0] > k:
        total += (part[:whole] * factors[:whole]).view(-1, k, features).sum(0)
        part, factors = part[whole:], factors[whole:]
    rest = part.shape[0]
    if rest:
        (total if rest == k else total[:rest]).addcmul_(part, factors)


def _empty(x: torch.Tensor, seed: Any, k: int, order: Any, real: Any) -> torch.Tensor:
    return x.new_empty(k, x.shape[1])


_deal_at_once = operator(
    "deal", "(Tensor x, Tensor seed, int k, Tensor? order, Tensor? real) -> Tensor", _deal, _empty
)
