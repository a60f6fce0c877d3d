"""The operators that put a value in memory: `lowtide::in_memory`, and for images `lowtide::image_in_memory`.

Inductor computes a cheap value anew inside every loop that reads it, instead of realizing it once. Where
a plan counts on a value, so that what it is made from can be dropped, its node is followed by this operator,
which does nothing but make Inductor write the value down: an image with its channels last.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from .._torch import private

__all__ = ["image_in_memory", "in_memory"]


@cache
def in_memory() -> Any:
    """The operator, made known to torch and to Inductor when it is first asked for."""
    flexible = torch.Tag.flexible_layout  # else its rows are not padded, nor written in place of padded ones
    torch.library.define("lowtide::in_memory", "(Tensor(a) x) -> Tensor(a)", tags=flexible)
    torch.library.impl("lowtide::in_memory", "CompositeExplicitAutograd", torch.ops.aten.alias.default)
    operator = torch.ops.lowtide.in_memory.default
    private("register_lowering")(operator, type_promotion_kind=None)(_realized)
    return operator


@cache
def image_in_memory() -> Any:
    """The one for images, made known in the same way."""
    torch.library.define("lowtide::image_in_memory", "(Tensor x) -> Tensor", tags=torch.Tag.flexible_layout)
    torch.library.impl("lowtide::image_in_memory", "CompositeExplicitAutograd", _channels_last)
    operator = torch.ops.lowtide.image_in_memory.default
    private("register_lowering")(operator, type_promotion_kind=None)(_realized)
    return operator


def _channels_last(x: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=torch.channels_last)


def _realized(value: Any) -> Any:
    value.realize()
    return value
