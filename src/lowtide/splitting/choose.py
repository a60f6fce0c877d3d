"""Which regions of a step run in chunks, and in how many: as few as its budget needs.

Problem: each region costs time where it is split (weights are read once for each chunk, products get
smaller), and saves bytes at the peak. Under a budget the least time is wanted, with "min" the least peak.

Method: regions of repeated layers go together, the largest first. The step as it is comes first, and is taken
where it fits with next to no recomputation. Then more and more kinds of regions are split, each in as few
chunks as fit, 2, 4, 8 and so on, as long as a chunk has enough rows. What a choice costs is seen by a quick
look (`solve.quick`); the best is planned in full, and the next best where it does not fit after all.

Limits: at most ten looks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

from ..capture.deferred_output import Deferral
from ..capture.trace import Trace
from ..console.log import log
from ..errors import BudgetTooSmall, PlanMismatch
from ..plans.graph import Graph
from ..solve.quick import quick, smallest
from ..solve.search.ladder import Rung
from ..stages import Asked, Captured, Planned, Priced, Split
from .defer import defer_results
from .regions import Region, find_regions, late_nodes, region_of
from .unroll import CannotSplitError, chunks_of, copied, unroll

__all__ = ["choose", "possible_with_split"]

LEAST_CHUNK = 128
"""Rows of a chunk, at the least, unless a number of chunks is asked for."""

_MOST = 64
_LOOKS = 10
_FREE = 0.02
"""Recomputation of this share of the step is not worth a split."""

_KINDS = 3
"""As many kinds of regions are looked at: the head, the MLP, and one more."""

Chosen = tuple[tuple[str, int], ...]
"""Regions by the name of their first product, with the number of chunks."""

Capture = Callable[[Asked, Captured, Trace], Captured]
Price = Callable[[Captured], Priced]
Plan = Callable[[Priced], Planned]


class Limits(Protocol):
    """What the budget says of a priced step."""

    def byte_limit(self, priced: Priced) -> int | None:
        """The bytes that it may take; None where the smallest peak is asked for."""

    def uncapped_peak(self, priced: Priced) -> int:
        """The peak of keeping everything of it."""

    def settled(self, priced: Priced) -> Asked:
        """What was asked, with the bytes of the knee of this step: other choices are held against these."""


@dataclass(eq=False)
class Draft:
    """The step with a choice of regions in chunks, and what that costs by a quick look."""

    priced: Priced
    byte_limit: int | None

    @property
    def graph(self) -> Graph:
        return self.priced.lifted.graph

    @cached_property
    def look(self) -> Rung:
        """A plan that was found quickly."""
        return smallest(self.graph) if self.byte_limit is None else quick(self.graph, self.byte_limit)

    @property
    def fits(self) -> bool:
        """Whether the quick plan keeps to the budget."""
        return self.byte_limit is None or self.look.peak <= self.byte_limit

    @property
    def cost(self) -> tuple[bool, float]:
        """What is to be small: seconds under a budget; the peak where none fits or the smallest is wanted."""
        by_peak = self.byte_limit is None or not self.fits
        return by_peak, self.look.peak if by_peak else self.look.seconds


class Ways:
    """The step with any of its regions in chunks, each way made once."""

    def __init__(
        self, asked: Asked, step: Captured, *, capture: Capture, price: Price, limits: Limits
    ) -> None:
        self.asked, self.step = asked, step
        self.capture, self.price, self.limits = capture, price, limits
        self.made: dict[Chosen, Draft] = {}
        self.whole = 0
        self.regions = {region.name: region for region in find_regions(step.trace, least_rows=self.least())}

    def least(self) -> int:
        """The fewest rows of a region that is looked at."""
        number = self.asked.options.split
        return 2 * LEAST_CHUNK if number is True or not number else 2 * number

    def kinds(self) -> list[list[Region]]:
        """Regions that are alike, those first that save the most."""
        found: dict[str, list[Region]] = {}
        for region in self.regions.values():
            found.setdefault(region.kind, []).append(region)
        return list(found.values())[:_KINDS]

    def numbers(self, region: Region) -> list[int]:
        """In how many chunks a region may run."""
        asked = self.asked.options.split
        if asked is not True and asked:
            return [asked]
        most = min(_MOST, region.rows // LEAST_CHUNK)
        return [2**power for power in range(1, 7) if 2**power <= most]

    def draft(self, chosen: Chosen) -> Draft:
        """The step with a choice of regions in chunks, priced."""
        if chosen not in self.made:
            trace = self.step.trace
            if chosen:
                trace = self.in_chunks(chosen)
            words = self.words(chosen) + _words_of(trace.deferred)
            asked = replace(self.asked, split=Split(chosen, self.whole, words))
            priced = self.price(self.capture(asked, self.step, trace))
            if not chosen:
                self.whole = self.limits.uncapped_peak(priced)
                self.asked = replace(self.asked, options=self.limits.settled(priced).options)
            self.made[chosen] = Draft(priced, self.limits.byte_limit(priced))
        return self.made[chosen]

    def in_chunks(self, chosen: Chosen) -> Trace:
        """A trace of its own, with a choice of regions in chunks."""
        trace = copied(self.step.trace)
        late = late_nodes(trace)
        for name, number in chosen:
            region = region_of(trace, name, late)
            if region is None:
                raise CannotSplitError(f"the step has no region {name!r} that could be split")
            if self.may_defer():
                defer_results(trace, region)
            unroll(trace, region, number, late=late, compiled=self.asked.compiled)
        trace.graph.lint()
        return trace

    def may_defer(self) -> bool:
        """Whether a result may be left to whoever reads it: the inputs of the step are known one by one."""
        places = self.step.places
        return bool(places) and not any(at is not None and at[1] for at in places)

    def words(self, chosen: Chosen) -> str:
        """What was chosen, as the note of a plan."""
        if not chosen:
            found = "none of its regions is worth it" if self.regions else "the step has no region for it"
            return f"nothing is split over rows: {found}"
        parts: dict[tuple[str, int, int], list[str]] = {}
        for name, number in chosen:
            region = self.regions.get(name)
            chunks = chunks_of(region.rows, number) if region else []
            module = re.sub(r"\d+", "*", region.module) if region else name
            parts.setdefault((module, len(chunks) or number, chunks[0][1] if chunks else 0), []).append(name)
        listed = [
            f"{module}{f' (x{len(names)})' if len(names) > 1 else ''} in {number} chunks of {rows} rows"
            for (module, number, rows), names in parts.items()
        ]
        return (
            "split over rows: "
            + ", ".join(listed)
            + "; weight gradients there are summed over chunks, equal to rounding"
        )


def _words_of(deferred: Sequence[Deferral]) -> str:
    if not deferred:
        return ""
    sizes = " and ".join(str(list(each.size)) for each in deferred)
    return f"; what the model returns of size {sizes} is computed when it is first read"


def choose(
    asked: Asked, step: Captured, *, capture: Capture, price: Price, limits: Limits, plan: Plan
) -> Planned:
    """The step, planned, with as few of its regions in chunks as its budget needs.

    A plan that was handed in brings its choice along. `capture`, `price` and `plan` are the ways to the
    stages, `limits` says what a step may take.
    """
    ways = Ways(asked, step, capture=capture, price=price, limits=limits)
    exact = ways.draft(())
    if asked.options.plan is not None:
        try:
            return plan(ways.draft(asked.options.plan.split).priced)
        except CannotSplitError as error:
            raise PlanMismatch(f"the plan was made for another step: {error}") from None
    if asked.options.budget is None and asked.options.split is not True:
        return plan(ways.draft(_every(ways)).priced)
    if asked.options.budget is None or not ways.regions or _is_free(exact):
        return plan(exact.priced)
    drafts = sorted(_candidates(ways), key=lambda draft: draft.cost)
    return _first_that_fits(drafts, plan)


def _every(ways: Ways) -> Chosen:
    """All regions, in the number of chunks that was asked for."""
    return tuple((region.name, ways.numbers(region)[0]) for kind in ways.kinds() for region in kind)


def _is_free(exact: Draft) -> bool:
    if exact.byte_limit is None or not exact.fits:
        return False
    return exact.look.seconds <= (1 + _FREE) * exact.graph.seconds


def _candidates(ways: Ways) -> list[Draft]:
    """The step as it is, and with more and more of it in chunks."""
    found = [ways.draft(())]
    looks = 1
    before: Chosen = ()
    for kind in ways.kinds():
        best: tuple[Draft, Chosen] | None = None
        for chosen in _finer(ways, before, kind, smallest_only=found[0].byte_limit is None):
            if looks >= _LOOKS:
                break
            draft = _attempt(ways, chosen)
            if draft is None:
                break
            looks += 1
            found.append(draft)
            worse = best is not None and draft.cost >= best[0].cost
            if best is None or not worse:
                best = draft, chosen
            if worse:
                break
        if best is not None and best[0].cost < min(draft.cost for draft in found if draft is not best[0]):
            before = best[1]
    return found


def _finer(ways: Ways, before: Chosen, kind: Sequence[Region], *, smallest_only: bool) -> Iterator[Chosen]:
    """One more kind of regions in chunks, more of them from one to the next."""
    numbers = ways.numbers(kind[0])
    for number in numbers[-2:] if smallest_only else numbers:
        yield (*before, *((region.name, number) for region in kind))


def _attempt(ways: Ways, chosen: Chosen) -> Draft | None:
    try:
        return ways.draft(chosen)
    except CannotSplitError as error:
        log.info(str(error))
        return None


def _first_that_fits(drafts: Iterable[Draft], plan: Plan) -> Planned:
    """Plan one after the other in full until there is a plan."""
    errors = []
    for draft in drafts:
        try:
            return plan(draft.priced)
        except BudgetTooSmall as error:
            errors.append(error)
            if len(errors) > 2:  # each of them costs a whole search
                break
    raise min(errors, key=lambda error: error.smallest)


def possible_with_split(
    asked: Asked, step: Captured, *, capture: Capture, price: Price, limits: Limits
) -> int | None:
    """A peak that the step can have with split=True, by a quick look; None where it has nothing to split."""
    ways = Ways(
        replace(asked, options=replace(asked.options, split=True)),
        step,
        capture=capture,
        price=price,
        limits=limits,
    )
    kinds = [kind for kind in ways.kinds() if ways.numbers(kind[0])][:2]
    if not kinds:
        return None
    chosen = tuple((region.name, ways.numbers(kind[0])[-1]) for kind in kinds for region in kind)
    draft = _attempt(ways, chosen)
    return None if draft is None else smallest(draft.graph).peak
