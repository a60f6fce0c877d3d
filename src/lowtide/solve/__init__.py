"""Solvers: `(Graph, budget) -> Schedule`, one file per method. No torch in here.

A method returns the best schedule it found under the budget; where it found none it returns the one with
the smallest peak, and `solve` turns that into an error that says what is possible. A budget of 0 therefore
asks for the smallest peak.
"""

from __future__ import annotations

from collections.abc import Callable

from ..errors import LowtideError
from ..graph import Graph
from ..schedule import Schedule
from .auto import auto
from .keep_all import keep_all
from .sqrt_segments import sqrt_segments

__all__ = ["METHODS", "auto", "find_method", "keep_all", "sqrt_segments"]

Method = Callable[[Graph, int], Schedule]

METHODS: dict[str, Method] = {"auto": auto, "keep_all": keep_all, "sqrt_segments": sqrt_segments}


def find_method(name: str) -> Method:
    """The solver of that name; raises with the known names otherwise."""
    if name not in METHODS:
        raise LowtideError(f"method {name!r} is not known; choose one of {', '.join(sorted(METHODS))}")
    return METHODS[name]
