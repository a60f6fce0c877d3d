"""Rows of a batch that end at different steps: after its end a row keeps its carry and gives zeros."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .._torch import private
from ..errors import LowtideError
from .sequence import flat, pair_of, say_leaf

__all__ = ["check_lengths", "masked"]


def masked(
    cell: Callable[[Any, Any], Any], xs: Any, lengths: torch.Tensor, steps: int, reduce: Any, *, reverse: bool
) -> tuple[Any, Any, Any]:
    """The cell and the inputs of a scan over rows of different lengths, and how to reduce its outputs.

    The last output of a row and the mean over its own steps are sums of outputs with weights, so that is
    what they become.
    """
    check_lengths(lengths, steps)
    if isinstance(reduce, tuple):
        raise LowtideError(
            "lengths= with a fold of your own is not supported; let the cell read a mask from xs"
        )
    lengths = lengths.to(next((leaf.device for leaf in flat(xs)[0]), lengths.device))
    times = torch.arange(steps, device=lengths.device)[:, None]
    inside = times < lengths
    weights = None
    if reduce == "last":
        weights, reduce = inside & (times == (0 if reverse else lengths - 1)), "sum"
    elif reduce == "mean":
        weights, reduce = inside.double() / lengths.clamp(min=1), "sum"

    def masking(carry: Any, x: Any) -> tuple[Any, Any]:
        x, here, weight = x
        after, ys = pair_of(cell(carry, x))
        if weight is not None:
            ys = _map(lambda y: _weighed(y, weight), ys)
        return _kept(here, after, carry), _map(lambda y: _inside(y, here), ys)

    return masking, (xs, inside, weights), reduce


def _kept(here: torch.Tensor, new: Any, old: Any) -> Any:
    """The next carry: the old one in rows that have ended."""
    leaves, form = private("tree_flatten")(new)
    before, old_form = private("tree_flatten")(old)
    if form != old_form or [_shape(leaf) for leaf in leaves] != [_shape(leaf) for leaf in before]:
        return new  # which the scan refuses
    rows = [torch.where(_like(here, a), a, b) for a, b in zip(leaves, before, strict=True)]
    return private("tree_unflatten")(rows, form)


def _shape(leaf: Any) -> Any:
    return getattr(leaf, "shape", None)


def _weighed(y: Any, weight: torch.Tensor) -> Any:
    return None if y is None else y * _like(weight, y).to(y.dtype)


def _inside(y: Any, here: torch.Tensor) -> Any:
    return None if y is None else torch.where(_like(here, y), y, torch.zeros_like(y))


def check_lengths(lengths: Any, steps: int) -> None:
    """Refuse lengths that are not one whole number of steps for each row."""
    if not isinstance(lengths, torch.Tensor) or lengths.ndim != 1 or not _is_whole(lengths.dtype):
        raise LowtideError(
            f"lengths is {say_leaf(lengths)}; it takes one whole number for each row of the batch"
        )
    if lengths.numel() and (lengths.min() < 0 or lengths.max() > steps):
        raise LowtideError(
            f"lengths go from {int(lengths.min())} to {int(lengths.max())}, but there are {steps} steps"
        )


def _is_whole(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def _map(function: Callable[..., Any], *trees: Any) -> Any:
    return private("tree_map")(function, *trees)


def _like(rows: torch.Tensor, leaf: Any) -> torch.Tensor:
    """One value for each row, in the shape of a leaf."""
    if not isinstance(leaf, torch.Tensor) or leaf.ndim == 0 or leaf.shape[0] != rows.shape[0]:
        raise LowtideError(
            f"lengths= needs the batch of {rows.shape[0]} rows first in every carry and output; here is "
            f"{say_leaf(leaf)}"
        )
    return rows.view(-1, *(1,) * (leaf.ndim - 1))
