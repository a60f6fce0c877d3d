"""Comparisons of a drawn number with a rate: what they say, if that is the same whatever is drawn.

Models that may skip a layer (LayerDrop, Fan et al. 2020) draw a number for each one, `torch.rand([])`,
and compare it with their rate. With a rate of zero, the default of many, or of one, the branch does not
depend on the draw. It stays in the step all the same: the random state afterwards is that of plain
PyTorch.

Only uniform draws of `torch.rand` are known here, which lie in [0, 1), compared with a Python number.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from .._torch import private_of, traced_value

__all__ = ["decided", "is_drawn_on_host"]

Compare = Callable[[Any, Any], bool]

_COMPARISONS: dict[Any, Compare] = {
    getattr(owner, name): getattr(operator, name)
    for owner in (operator, torch)
    for name in ("lt", "le", "gt", "ge")
}
_METHODS: dict[Any, Compare] = {name: getattr(operator, name) for name in ("lt", "le", "gt", "ge")}
_TURNED = {
    operator.lt: operator.gt,
    operator.le: operator.ge,
    operator.gt: operator.lt,
    operator.ge: operator.le,
}


def decided(condition: fx.Node) -> bool | None:
    """What a comparison says whatever number is drawn; None where that depends on the number, or is none."""
    found = _compared(condition)
    if found is None:
        return None
    compare, bound = found
    if bound <= 0:  # no draw is below it, nor equal unless both are zero
        certain = {operator.lt: False, operator.ge: True} | (
            {operator.le: False, operator.gt: True} if bound < 0 else {}
        )
        return certain.get(compare)
    if bound >= 1:
        return compare in (operator.lt, operator.le)
    return None


def is_drawn_on_host(condition: fx.Node) -> bool:
    """Whether a condition compares a number that is drawn on the host with a Python number."""
    return _compared(condition) is not None and traced_value(condition).device.type == "cpu"


def _compared(condition: fx.Node) -> tuple[Compare, float] | None:
    """The comparison and the number, as in `draw < number`."""
    compare = (_METHODS if condition.op == "call_method" else _COMPARISONS).get(condition.target)
    if compare is None or len(condition.args) != 2 or condition.kwargs:
        return None
    left, right = condition.args
    if _is_number(right) and _is_uniform(left):
        return compare, float(right)  # type: ignore[arg-type]
    if _is_number(left) and _is_uniform(right):
        return _TURNED[compare], float(left)  # type: ignore[arg-type]
    return None


def _is_number(item: Any) -> bool:
    return isinstance(item, int | float)


def _is_uniform(item: Any) -> bool:
    """Whether a node is a uniform draw that nothing was written to."""
    if not isinstance(item, fx.Node) or item.op != "call_function" or item.target is not torch.rand:
        return False
    value = traced_value(item)
    return isinstance(value, torch.Tensor) and not private_of(value, "version")
