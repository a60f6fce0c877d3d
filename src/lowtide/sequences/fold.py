"""A fold of the outputs with a state of its own: the state travels in the carry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import LowtideError

__all__ = ["folded"]


def folded(cell: Callable[[Any, Any], Any], init: Any, reduce: tuple[Any, ...]) -> tuple[Any, Any, None]:
    """A cell that folds its outputs into its carry, the start of that carry, and nothing left to reduce."""
    if len(reduce) != 2 or not callable(reduce[0]):
        raise LowtideError(
            f"reduce={reduce!r} is not a pair (function, start), as in (torch.maximum, torch.zeros(8))"
        )
    fold, start = reduce

    def folding(carry: Any, x: Any) -> tuple[Any, None]:
        inner, state = carry
        result = cell(inner, x)
        if not isinstance(result, tuple) or len(result) != 2:
            raise LowtideError("the cell must return a pair: the next carry and an output")
        return (result[0], fold(state, result[1])), None

    return folding, (init, start), None
