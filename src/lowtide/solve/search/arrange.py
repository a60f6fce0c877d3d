"""Orders of first runs, annealed: for the bytes that no recomputation can save where it is too late for them.

Problem: a descent decides what is recomputed and leaves the first runs where they stand. In a good order less
has to be recomputed, but which order is good shows only where memory is short.

Method: simulated annealing (Kirkpatrick et al. 1983) of an order in which everything runs once. A step moves
one run to another place that `precedence` allows; what counts is the excess, the bytes above a budget summed
over all runs. There are two budgets, both so low that the excess never ends: what is pressed down is then the
whole profile and not its peak, which recomputation would take away for little.

Complexity: `STEPS` per op and budget, each some two edits of a tape.

Limits: values that the search would recompute anyway count as if they were kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .search import Search

__all__ = ["arrange"]

BUDGETS = (0.4, 0.2)
"""Of the peak of keeping everything. Chosen on steps of 90 to 430 ops: plans below half of the peak become up
to a quarter cheaper; with 0.6 or 0.8 hardly any does."""

STEPS = 200
"""Per op. Chosen: with 600 some plans get better and as many worse."""

HEAT = (1.0, 0.05)
"""First and last, as shares of the bytes of a value on average. Chosen: 0.3 and 5 lead to the same peaks."""


def arrange(search: Search, base: Sequence[int]) -> tuple[list[list[int]], int]:
    """One annealed order for each of the budgets, and the edits of a tape that they took."""
    facts, orders, edits = search.facts, [], 0
    size = sum(facts.size) / max(len(facts.size), 1)
    for seed, share in enumerate(BUDGETS, 1):
        tape = search.native_tape(base)
        steps, heat = STEPS * len(facts.own), (HEAT[0] * size, HEAT[1] * size)
        tape.anneal(int(search.top * share), steps=steps, price=1.0, heat=heat, shifts=1.0, seed=seed)
        search.note(tape)
        orders.append(tape.order())
        edits += tape.edits
    return orders, edits
