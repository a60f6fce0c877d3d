"""Random numbers that can be redrawn: hashes of a counter and a seed, in plain integer arithmetic.

A seed is the coefficients of two random polynomials of degree three over the integers modulo the prime
2^31 - 1 (Wegman and Carter 1981). The value of such a polynomial at 0, 1, 2, ... is a number for each row
of which any four are independent. The variance of a sketch by signs involves four of them at a time, so its
closed form holds exactly. No product exceeds 62 bits, so every device and compiler gives the same
bits; nothing is read back to the host.
"""

from __future__ import annotations

import torch

__all__ = ["SEED_BYTES", "chosen", "draw_seed", "normals", "signs", "uniforms"]

_PRIME = 2**31 - 1
_SHAPE = (2, 4)

SEED_BYTES = 64
"""What a seed takes on its device."""


def draw_seed(like: torch.Tensor) -> torch.Tensor:
    """A seed from the default generator of a tensor's device."""
    if torch.compiler.is_compiling():
        return _traced_seed(like)  # type: ignore[no-any-return]
    return _seed(like)


def _seed(like: torch.Tensor) -> torch.Tensor:
    """What draws; while a step is traced it is an operator of its own, which every compiler runs once.

    torch's partitioner draws `randint` a second time for the backward (seen in 2.13), which would then use
    other signs than the forward. It does not do so to operators that it does not know.
    """
    return torch.randint(_PRIME, _SHAPE, device=like.device)


torch.library.define("lowtide::seed", "(Tensor like) -> Tensor", tags=torch.Tag.nondeterministic_seeded)
torch.library.impl("lowtide::seed", "CompositeExplicitAutograd", _seed)
torch.library.register_fake("lowtide::seed", lambda like: like.new_empty(_SHAPE, dtype=torch.int64))
_traced_seed = torch.ops.lowtide.seed.default


def signs(index: torch.Tensor, seed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A random sign for each index, of which any four are independent."""
    bit = _hashed(index, seed[0]) & 1
    return torch.rsub(bit, 1, alpha=2).to(dtype)


def uniforms(index: torch.Tensor, coefficients: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A number between 0 and 1 for each index, by one of the two polynomials of a seed."""
    return (_hashed(index, coefficients).to(dtype) + 0.5) * (1 / _PRIME)


def normals(index: torch.Tensor, seed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A standard normal number for each index (Box and Muller 1958)."""
    radius = torch.sqrt(-2 * torch.log(uniforms(index, seed[0], dtype)))
    return radius * torch.cos(2 * torch.pi * uniforms(index, seed[1], dtype))


def chosen(rows: int, k: int, seed: torch.Tensor, real: torch.Tensor | None = None) -> torch.Tensor:
    """The indices of k rows without replacement; rows that are not real come last."""
    keys = _hashed(torch.arange(rows, device=seed.device), seed[1])
    if real is not None:
        keys = torch.where(real, keys, _PRIME)
    return keys.argsort()[:k]


def _hashed(index: torch.Tensor, coefficients: torch.Tensor) -> torch.Tensor:
    """The value of a polynomial at each index, from 0 to 2^31 - 2."""
    cubic, square, linear, constant = coefficients.unbind()
    value = torch.addcmul(square, index, cubic) % _PRIME
    value = torch.addcmul(linear, index, value) % _PRIME
    return torch.addcmul(constant, index, value) % _PRIME
