"""The checkpoints of a chain with the least peak.

Problem: layers one after the other, vertex k with an output of d_k bytes. Keep some outputs, the first and
the last among them; drop the others and recompute them, once, segment by segment, in the backward. Which
ones give the least peak?

Method: Hong, Tsai, Wang, Liu, Wu, "GPU Memory Usage Optimization for Backward Propagation in Deep Network
Training" (2025).

- Objective "total": all kept outputs plus the largest interior of a segment. For a bound B on the interiors,
  f(j) = d_j + min { f(i) : interior(i, j) <= B } by a sliding-window minimum, for each of the O(n²) values
  that B can have: O(n³) ("cubic"). f(n-1) never rises with B, so most B are ruled out by their neighbours.
- Objective "swept": when segment (i, j) goes backward, only the outputs kept up to i are still there.
  M(n-1) = d_{n-1},  M(i) = d_i + min_{j>i} max( M(j), U(i, j) ); the least peak is M(0). U is a law of
  `laws`. Any law: O(n²) ("quadratic"). A monotone law: O(n) ("linear"). Candidates j wait in a queue, j
  increasing and M strictly decreasing; once the second last has M <= U(i, last), the last never wins again.

Ties fall towards less recomputation. "total": the most bytes kept of all sets with the least peak.
"swept": each next checkpoint is the nearest that does not raise the peak, so no output can be added to the
kept ones without raising it. With a larger `budget` the same walk keeps more.

On a captured graph (`chain`), the stages of `chain_stages.py` are the layers, the bytes that cross a cut are
the outputs, and each stage's saved bytes and working set make the law; the simulator judges what comes out.

Limits: one level of recomputation, time is not looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from numbers import Integral
from typing import Literal, TypeAlias

from ...errors import BudgetTooSmall, LowtideError
from ...plans.graph import Graph
from ...plans.keep_all import keep_all
from ...plans.order import first_order
from ...plans.schedule import Schedule
from ...plans.simulator import simulate
from ..best import best_schedule
from ..chain_stages import find_stages
from .laws import Measured, Model, find_law, refuse_if_above, refuse_unless_monotone
from .measures import kept_cuts, segment_actions
from .search import least_total, linear, quadratic, swept_peak, walk

__all__ = ["Checkpoints", "Measured", "chain", "chain_orders", "checkpoints", "peak_of"]

Objective: TypeAlias = Literal["total", "swept"]
Algorithm: TypeAlias = Literal["cubic", "linear", "quadratic"]

ALGORITHMS = {"total": ("cubic",), "swept": ("linear", "quadratic")}
MOST_BYTES = 2**60
STAGE_COUNTS = (400, 48, 16)
BOUNDS = 12
OPS_IN_BOUNDS = 30_000
"""Large graphs get fewer bounds: about this many ops in all are put in order for each number of stages."""


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Which outputs are kept, both ends included, and the peak that this gives."""

    indices: tuple[int, ...]
    peak: int

    @property
    def segments(self) -> tuple[tuple[int, int], ...]:
        """The segments (i, j) between neighbours."""
        return tuple(pairwise(self.indices))


def checkpoints(
    sizes: Sequence[int],
    objective: Objective = "total",
    method: Algorithm | None = None,
    *,
    model: Model | None = None,
    budget: int | None = None,
) -> Checkpoints:
    """The outputs to keep for the least peak; under a larger `budget` ("swept" only), more of them.

    `method` is the objective's fastest when it is not given. `model` is the law of "swept": "paper",
    "pytorch", `Measured(extra, work)` or a function (i, j) -> bytes ("quadratic", or monotone).

    >>> checkpoints([1] * 9, "total")
    Checkpoints(indices=(0, 2, 4, 6, 8), peak=6)
    >>> checkpoints([4, 9, 2, 9, 2, 9, 1], "swept", model="pytorch")
    Checkpoints(indices=(0, 2, 4, 5, 6), peak=27)
    """
    sizes = _checked(sizes)
    budget = None if budget is None else _whole("budget", budget)
    algorithm = _algorithm(objective, method, model, budget)
    if objective == "total":
        peak, indices = least_total(sizes)
        return Checkpoints(indices, peak)
    law = find_law(sizes, model or "paper")
    if algorithm == "linear":
        refuse_unless_monotone(law, len(sizes))
        least, fits = linear(sizes, law), None
    else:
        least, fits = quadratic(sizes, law), law
    if budget is not None and budget < least[0]:
        text = f"budget {budget} is below the least peak {least[0]} of this chain; try budget >= {least[0]}"
        raise BudgetTooSmall(text, budget=budget, smallest=least[0])
    limit = least[0] if budget is None else budget
    indices = walk(sizes, least, limit, fits)
    if algorithm == "linear":
        refuse_if_above(limit, sizes, indices, law)
    return Checkpoints(indices, swept_peak(sizes, indices, law))


def peak_of(
    sizes: Sequence[int],
    indices: Sequence[int],
    objective: Objective = "total",
    *,
    model: Model | None = None,
) -> int:
    """The peak of keeping these outputs.

    >>> peak_of([1] * 9, [0, 4, 8], "total")
    6
    """
    sizes = _checked(sizes)
    _algorithm(objective, None, model, None)
    indices = [_whole(f"indices[{place}]", index) for place, index in enumerate(_listed("indices", indices))]
    if not indices or indices != sorted({0, *indices, len(sizes) - 1}):
        raise LowtideError(f"indices {indices} must rise from 0 to {len(sizes) - 1}, the last output")
    if objective == "swept":
        return swept_peak(sizes, indices, find_law(sizes, model or "paper"))
    sums = list(accumulate(sizes))
    interiors = [sums[j] - sizes[j] - sums[i] for i, j in pairwise(indices)]
    return sum(sizes[i] for i in indices) + max(interiors, default=0)


def _listed(name: str, numbers: Iterable[int]) -> list[int]:
    try:
        return list(numbers)
    except TypeError:
        raise LowtideError(f"{name} is {numbers!r}; expected a list of whole numbers") from None


def _whole(name: str, number: int) -> int:
    if not isinstance(number, Integral) or isinstance(number, bool):
        raise LowtideError(f"{name} is {number!r}; expected a whole number")
    return int(number)


def _checked(sizes: Sequence[int]) -> list[int]:
    listed = _listed("sizes", sizes)
    if not listed:
        raise LowtideError("sizes is empty; a chain has at least one output")
    for index, size in enumerate(listed):
        if not isinstance(size, Integral) or isinstance(size, bool) or size < 0:
            raise LowtideError(f"sizes[{index}] is {size!r}; expected a whole number of bytes >= 0")
    found = list(map(int, listed))
    if sum(found) > MOST_BYTES:
        raise LowtideError(f"the sizes sum to {sum(found)}; more than 2**60 bytes cannot be planned")
    return found


def _algorithm(objective: str, method: str | None, model: object, budget: int | None) -> str:
    """The algorithm to use, or an error that says which there are."""
    if objective not in ALGORITHMS:
        raise LowtideError(f"objective {objective!r} is not known; choose 'total' or 'swept'")
    known = ALGORITHMS[objective]
    if method is not None and method not in known:
        raise LowtideError(
            f"there is no {method!r} algorithm for objective {objective!r}; choose {' or '.join(known)}"
        )
    if objective == "total" and (model is not None or budget is not None):
        raise LowtideError("model and budget belong to objective='swept'; 'total' counts outputs only")
    plain = not callable(model) or getattr(model, "monotone", False)
    return method or (known[0] if plain else "quadratic")


def chain(graph: Graph, budget: int) -> Schedule:
    """The fastest schedule with one level of checkpoints that fits, or the one with the smallest peak."""
    plain = keep_all(graph)
    if simulate(graph, plain).peak <= budget:
        return plain
    return best_schedule(graph, chain_orders(graph), budget)


def chain_orders(graph: Graph) -> Iterator[tuple[list[str], list[str]]]:
    """The orders of runs of all candidates; the first is keeping everything."""
    yield first_order(graph)
    bounds = min(max(OPS_IN_BOUNDS // max(len(graph.ops), 1), 4), BOUNDS)
    seen: set[tuple[tuple[str, ...], ...]] = set()
    for most in STAGE_COUNTS:
        stages = find_stages(graph, most)
        if len(stages) < 2 or stages.forward in seen:
            continue
        seen.add(stages.forward)
        for kept in kept_cuts(stages, bounds):
            yield stages.order(segment_actions(kept))
