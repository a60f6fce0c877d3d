"""Solvers: `(Graph, budget) -> Schedule`, one file or folder per method.

A method returns the best schedule it found under the budget; where it found none it returns the one with
the smallest peak, and the caller turns that into an error that says what is possible. A budget of 0 therefore
asks for the smallest peak. The folders `sequence`, `chain`, `lower_sets` and `rotor` also hold their papers'
algorithms on plain numbers; `bound` proves how far from the optimum a plan can be.

In: a `Graph` with prices, and a budget in bytes.
Out: a `Schedule`; `bound` gives seconds.
Imports: plans/. No torch.

>>> import lowtide
>>> lowtide.solve.sequence.forward_count(1000, 50)  # runs of a step, for 1000 of them and 50 slots
2948
>>> sorted(lowtide.solve.METHODS)[:4]
['auto', 'chain', 'exact', 'keep_all']
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ..errors import LowtideError
from ..plans.graph import Graph
from ..plans.keep_all import keep_all
from ..plans.schedule import Schedule
from . import bound, chain, exact, lower_sets, rotor, sequence
from .auto import auto
from .sqrt_segments import sqrt_segments

__all__ = [
    "METHODS",
    "Method",
    "auto",
    "bound",
    "chain",
    "exact",
    "find_method",
    "keep_all",
    "lower_sets",
    "rotor",
    "sequence",
    "sqrt_segments",
]

Method = Callable[[Graph, int], Schedule]

METHODS: dict[str, Method] = {
    "auto": auto,
    "chain": chain.chain,
    "exact": exact.exact,
    "keep_all": keep_all,
    "lower_sets": lower_sets.lower_sets,
    "lower_sets_approximate": partial(lower_sets.lower_sets, family="approximate"),
    "rotor": rotor.rotor,
    "sequence": sequence.sequence,
    "sqrt_segments": sqrt_segments,
}
"""Solvers by name."""


def find_method(name: str) -> Method:
    """The solver of that name; raises with the known names otherwise."""
    if not isinstance(name, str) or name not in METHODS:
        raise LowtideError(f"method {name!r} is not known; choose one of {', '.join(sorted(METHODS))}")
    return METHODS[name]
