"""How far a step's gradients are from those in double precision, with a cap and without.

Where a step rounds differently from plain PyTorch, that it does so says little: both are rounded. What counts
is which of them is nearer to the exact gradient, or whether they are equally far from it. So the model is
copied, with its batch, to double precision, and its step run once.

Limits: modules only, since a function's tensors cannot be copied; not where the step draws random numbers,
which are others in another precision, nor under autocast, whose point are lower precisions; and where memory
is too small for the copy there is nothing to compare with.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from .._torch import private
from ..measuring.trial import Trial

__all__ = ["Rounding", "rounding_of"]


class Rounding(NamedTuple):
    """The largest error of a gradient, relative to its norm: of plain PyTorch, and of the capped step."""

    plain: float
    capped: float


def rounding_of(
    model: Any, trial: Trial, plain: Mapping[str, Any], capped: Mapping[str, Any]
) -> Rounding | None:
    """The errors of two steps against double precision; None where that cannot be run or compared."""
    if not isinstance(model, torch.nn.Module) or trial.autocast or trial.draws(plain):
        return None
    try:
        exact = _run_in_double(model, trial)
    except (torch.OutOfMemoryError, RuntimeError, TypeError):
        return None
    names = [name for name, tensor in exact.items() if name.startswith("gradients") and tensor is not None]
    errors = [
        max((_error(step.get(name), exact[name]) for name in names), default=0.0) for step in (plain, capped)
    ]
    return Rounding(*errors) if all(map(math.isfinite, errors)) else None


def _run_in_double(model: torch.nn.Module, trial: Trial) -> dict[str, Any]:
    trial.start_again()
    double = copy.deepcopy(model).double()
    batch, kwargs = private("tree_map_only")(torch.Tensor, _doubled, trial.inputs)
    found, _ = Trial(double, batch, kwargs, trial.loss).run(double)
    return found


def _doubled(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.dtype.is_floating_point:
        return tensor
    return tensor.detach().double().requires_grad_(tensor.requires_grad)


def _error(gradient: torch.Tensor | None, exact: torch.Tensor) -> float:
    if gradient is None:
        return math.inf
    norm = float(exact.norm())
    gap = float((gradient.double() - exact).norm())
    return gap / norm if norm else gap
