"""A fold of the outputs with a state of its own: the state travels in the carry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import LowtideError
from .sequence import pair_of

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
        after, y = pair_of(cell(inner, x))
        return (after, fold(state, y)), None

    return folding, (init, start), None
