"""Three numbers of a layer's input x and output gradient g from which the variances of sketches follow.

With rows x_i and g_i, and Frobenius norms: A = |x|^2 |g|^2, C = |g^T x|^2, D = sum of |x_i|^2 |g_i|^2.
The paper (Bershatsky et al. 2022) has C with the wrong sign for Gaussian sketches, whose variance is
(A + C) / k; its (A - C) / k is that of rows that are drawn by their norms.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .kind import sum_dtype

__all__ = ["Moments", "moments"]


class Moments(NamedTuple):
    """A, C and D of a layer, and the number of its rows."""

    a: float
    c: float
    d: float
    rows: int

    @property
    def own(self) -> float:
        """The variance of the summed gradient itself, over batches of as many independent rows."""
        return max(0.0, (self.rows * self.d - self.c) / (self.rows - 1)) if self.rows > 1 else 0.0

    @property
    def signed(self) -> float:
        """A + C - 2 D: what collides in sketches by random signs, with every row alone taken out."""
        return max(0.0, self.a + self.c - 2 * self.d)


def moments(x: torch.Tensor, g: torch.Tensor) -> Moments:
    """The moments of an input and an output gradient."""
    x, g = x.to(sum_dtype(x)), g.to(sum_dtype(g))
    of_x, of_g = (t.square().sum(1, dtype=torch.float64) for t in (x, g))
    c = torch.mm(g.t(), x).square().sum(dtype=torch.float64)
    a, c, d = torch.stack([of_x.sum() * of_g.sum(), c, of_x @ of_g]).tolist()
    return Moments(a, c, d, x.shape[0])
