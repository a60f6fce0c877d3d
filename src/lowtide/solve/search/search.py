"""The search for the ladder of a graph: descents, seeds of other methods, and repairs after random ruin.

Problem: find, for all budgets at once, orders of runs with few seconds and small peaks.

Method, in this order:

1. *Down*, from each of a few orders of first runs (the best of `reorder`, then those of `arrange`): targets
   from the peak of keeping everything to what the largest single run needs are each planned for by greedy
   descents (see `greedy`), which go on from the plan for the target before and start afresh with several
   weights of bytes against seconds.
2. *Plant* the plans of other methods (see `seeds`), and *graft*: descend to each target from the plans right
   above it.
3. *Bisect*: between the last target reached and the first one missed, look for the smallest peak.
4. *Improve*: ruin plans at random and mend them (see `ruin`), as long as the effort allows.
5. *Up*: fill the space between the targets by taking repeated runs away as the budget grows.
6. *Settle*, on graphs of up to some sixty ops: at each rung look through all orders (see `any_order`), as
   far as the effort goes, for a faster one, and below the last rung for one that fits at all.
7. *Anneal* (simulated annealing, Kirkpatrick et al. 1983), on graphs of up to a hundred ops, where that is
   not settled: put single runs in, out and elsewhere at random, cooling down.
8. *Fill*: one more descent each for finer targets. *Sink*: descend towards the floor from plans all along the
   ladder.

Nothing of that depends on a budget, on the clock or on a random seed of the process: the effort is counted in
edits of the tape, and the noise is a hash. So the same graph gets the same ladder.

9. *At* a budget that is asked for, a few more descents go to that very budget, since no budget of bytes is
   one of the targets, and its plan is improved as those at the targets were. What is found joins the ladder.

Complexity: about `Effort.edits` edits for graphs of up to some thousand ops, above that about ten descents.

Limits: a local search. `bound` says how far from the optimum it may be.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache, partial
from time import time
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from ...errors import OutOfTime
from ...plans.graph import Graph
from ...plans.patience import check_time, out_of_time, until
from ..bound.moments import RequiredOps
from .arrange import arrange
from .effort import effort_for
from .greedy import PlainTape
from .ladder import Ladder, Rung
from .native import NativeTape, NoMemory, judge, library
from .reorder import first_orders
from .ruin import improve, improve_at
from .seeds import ask_at_budget, seed_orders
from .settle import settle, settle_at, settle_smallest
from .tape import Facts

__all__ = ["Search", "by_either"]

Found = TypeVar("Found")

EXPONENTS = (1.4, 1.0, 0.7, 2.0, 0.5)
"""Weights of the bytes that a move gains against its seconds, the best one first. Chosen: in another order,
or with the first two alone, one plan in ten changes, by 2 % either way. (This and the other constants are
varied by benchmarks/constants.py, on synthetic steps of 40 to 130 ops.)"""

MOST_EDITS = 60
"""How many edits of the tape a descent may make per op: near the floor it could go on for long. Chosen: no
plan moves with 30 or 120."""

LONG, MOST_LONG = 3, 8
"""Orders of more than `LONG` runs per op are not worked on; `MOST_LONG` of them are at least pruned. Chosen,
for the time that long orders take: no plan moves with 2 or 6, nor with 4 or 16. (`LONG` is above 1, or no
order is short.)"""

FINER = (0.7, 0.4, 0.2, 0.1, 0.03)
"""Targets between the floor and the last round one, as shares of that way. Chosen: with none or two of them
one plan in ten changes, by up to 3 %, and the smallest peak by up to 4 %, for the better as it happens."""

SHIFTS = (0.0, 0.4, 0.0)
"""Shares of the annealing's steps that move runs, in turn. Chosen: with moves in every turn, or in the first,
a block of a transformer is up to 1 % slower, for what runs again matters more there than the order."""

HEAT, PRICES = (0.05, 0.002), (30.0, 5.0)
STEPS, MOST_STEPS, MOST_BUDGETS = 500, 1_500_000, 48
"""Of the annealing: first and last heat as shares of the step's seconds, prices of the excess in turn as
multiples of what would make all of it as dear as the step, steps per op, of all, and how many budgets.
Chosen, for a second or two of annealing: on steps of 40 to 50 ops no plan moves when one of them is halved or
doubled."""


def by_either(search: Callable[[bool], Found]) -> Found:
    """What a search finds: by the compiled twins, or where they run out of memory by those in Python."""
    try:
        return search(True)
    except NoMemory:
        _say_no_memory()
    return search(False)


@cache
def _say_cut() -> None:
    logging.getLogger("lowtide").warning(
        "the search for a plan was ended by planning_seconds: the best until then is taken; more seconds may "
        "find a faster or a smaller one"
    )


@cache
def _say_no_memory() -> None:
    logging.getLogger("lowtide").warning(
        "there is no memory for the compiled search of a plan: it is searched in Python, which finds less in "
        "the same time"
    )


class Search:
    """The search for one graph's ladder; `ladder` is what was found so far."""

    def __init__(
        self, graph: Graph, progress: Callable[[float], None] | None = None, *, native: bool = True
    ) -> None:
        self.graph, self.progress, self.until = graph, progress, until()
        self.facts = Facts(graph)
        self.native = native and library() is not None
        self.effort = effort_for(len(graph.ops), self.native)
        self.exponents = EXPONENTS
        self.ladder = Ladder()
        self.tried: set[tuple[int, float, int, float]] = set()
        # 200 more for small graphs, where a descent of few ops still needs many edits to get through.
        self.limit = MOST_EDITS * (len(graph.ops) + 200)
        orders = [self.facts.order(*order) for order in first_orders(graph)]
        tapes = [self.tape(order) for order in orders]
        for tape in tapes:
            self.note(tape)
        # An order is judged by how low it could go (its largest single run), then by its peak.
        promises = [(self.facts.floor(o), tape.peak()) for o, tape in zip(orders, tapes, strict=True)]
        # `floor` is for orders like these; another one may go lower, but none below `least_bytes`.
        self.top, self.floor, self.once = tapes[0].peak(), min(promises)[0], tapes[0].seconds
        self.least_bytes = RequiredOps(graph).least_bytes()
        # The orders of first runs to start from: those that can go lowest.
        ranked = sorted(range(len(orders)), key=promises.__getitem__)
        self.first = self.bases = [orders[index] for index in ranked[: self.effort.orders]]
        self.spent = 0
        self.targets = self._targets()
        self.asked: set[int] = set()

    def run(self) -> Ladder:
        """The ladder; where there is no time for all of it, what was found until then."""
        self.in_time(self.look)
        return self.ladder

    def in_time(self, look: Callable[[], None]) -> None:
        """Look for plans until there is no time for more."""
        try:
            look()
        except OutOfTime:
            self.ladder.cut = self.until
            _say_cut()

    def look(self) -> None:
        """Find the ladder, phase by phase."""
        if self.effort.arranged:
            orders, self.spent = arrange(self, self.first[0])
            self.bases = [self.first[0], *orders][: self.effort.orders]
        self.plant(self.down_and_seeds())
        self.tell(0.4)
        self.graft()
        self.tell(0.5)
        self.bisect()
        self.tell(0.6)
        improve(self)
        self.up()
        settled = settle(self, self.effort.work)
        self.anneal(settled)
        settle_smallest(self, self.effort.work)
        self.fill()
        self.sink()
        self.tell(1.0)

    def down_and_seeds(self) -> list[list[int]]:
        """Go down from each base, and gather the plans of other methods meanwhile.

        The compiled search runs without Python's lock, so each base takes a core of its own where there are
        some. Their ladders are joined in the order of the bases: how fast each was makes no difference.
        """
        if not self.native:
            for base in self.bases:
                self.join(self.down(base))
            return self.seeds()
        with ThreadPoolExecutor(len(self.bases)) as pool:
            try:
                found = pool.map(self.down, self.bases)
            except RuntimeError:  # there is no memory for a thread
                found = map(self.down, self.bases)
            seeds = self.seeds()
            for index, ladder in enumerate(found):
                self.join(ladder)
                self.tell(0.3 * (index + 1) / len(self.bases))
        return seeds

    def join(self, other: Ladder) -> None:
        """Take over the rungs of another ladder that improve on this one."""
        for rung in other:
            self.ladder.add(rung)

    def tell(self, share: float) -> None:
        if self.progress is not None:
            self.progress(share)

    def tape(self, order: Sequence[int] | npt.NDArray[np.int32]) -> NativeTape | PlainTape:
        self.check_time()
        if self.native:
            return NativeTape(self.facts, order, until=self.until)
        return PlainTape(self.facts, [*map(int, order)])

    def native_tape(self, order: Sequence[int] | npt.NDArray[np.int32]) -> NativeTape:
        tape = self.tape(order)
        assert isinstance(tape, NativeTape)
        return tape

    def check_time(self) -> None:
        """The bound is one of the thread that plans: threads of the search ask here."""
        if self.ladder.peaks and time() > self.until:
            raise out_of_time()

    def note(self, tape: NativeTape | PlainTape, ladder: Ladder | None = None) -> None:
        """Put a plan on a ladder, the one of the search unless another is named."""
        ladder = self.ladder if ladder is None else ladder
        peak, seconds = tape.peak(), tape.seconds
        if ladder.improves(peak, seconds):
            ladder.add(Rung(peak, seconds, tape.in_order()))

    def at(self, budget: int) -> Rung:
        """The fastest plan under a budget, or the smallest plan, after descents to that very budget."""
        if not self.is_settled(budget):
            self.asked.add(budget)
            self.in_time(partial(self.descend_to, budget))
        return self.ladder.best_or_smallest(budget)

    def descend_to(self, budget: int) -> None:
        """Put the plans that are found for a budget on the ladder."""
        self.afresh(budget)
        self.plant_at(budget)
        self.graft_to(budget)
        improve_at(self, budget)
        self.loosen(budget)
        settle_at(self, budget, self.effort.work)

    def is_settled(self, budget: int) -> bool:
        """Whether descents to a budget were made, or would be in vain."""
        return budget in self.asked or not self.floor <= budget < self.top

    def afresh(self, budget: int) -> None:
        """Descend to a budget from each of the orders of first runs."""
        exponents = EXPONENTS if self.native else EXPONENTS[: self.effort.exponents]
        for start in map(self.tape, self.first):
            if start.peak() > budget:
                for exponent in exponents:
                    self.attempt(start, budget, exponent)

    def plant_at(self, budget: int) -> None:
        """Let the plans of another method for this very budget join, where judging them takes no time."""

        def fits(order: tuple[list[str], list[str]]) -> bool:
            runs = self.facts.order(*order)
            peak, seconds = judge(self.facts, runs)
            if self.ladder.improves(peak, seconds):
                self.note(self.tape(runs))
            return peak <= budget

        if self.native:
            ask_at_budget(self.graph, fits)

    def loosen(self, budget: int) -> None:
        """Take repeated runs away from the best plan under a budget, as far as the budget allows."""
        best = self.ladder.best(budget)
        if best is not None and self.short(best.order):
            tape = self.tape(best.order)
            tape.prune(budget)
            self.note(tape)

    def _targets(self) -> list[int]:
        """Targets from the top to the floor: round shares of the top, as people ask for them, then finer."""
        shares = [share / 100 for share in range(100 - self.effort.step, 0, -self.effort.step)]
        round_ones = [int(self.top * share) for share in shares if self.top * share > self.floor]
        last = round_ones[-1] if round_ones else self.top
        finer = [self.floor + int((last - self.floor) * share) for share in FINER]
        return sorted({*round_ones, *finer}, reverse=True)

    def _targets_between(self) -> list[int]:
        """Finer shares of the top, for plans that cost a single descent each."""
        between = self.effort.between
        shares = range(100 - between, 0, -between) if between else ()
        return [target for share in shares if (target := self.top * share // 100) > self.floor]

    def attempt(
        self, start: NativeTape | PlainTape, target: int, exponent: float, ladder: Ladder | None = None
    ) -> NativeTape | PlainTape:
        """One descent from a copy of a tape to a target, cleaned up."""
        self.check_time()
        self.tried.add((start.peak(), start.seconds, target, exponent))
        tape = start.copy()
        tape.descend(target, exponent=exponent, tolerance=self.effort.tolerance, limit=self.limit)
        tape.prune(max(target, tape.peak()))
        self.note(tape, ladder)
        return tape

    def down(self, base: Sequence[int]) -> Ladder:
        """A ladder from one base: plan for each target in turn, until two in a row are out of reach."""
        found = Ladder()
        with suppress(OutOfTime):  # what was found until then counts
            self.descend_all(base, found)
        return found

    def descend_all(self, base: Sequence[int], found: Ladder) -> None:
        first = last = self.tape(base)
        fresh = list(EXPONENTS[: self.effort.exponents])
        missed = 0
        for target in [target for target in self.targets if target < first.peak()]:
            tapes = [self.attempt(last, target, EXPONENTS[0], found)]
            for exponent in list(fresh):
                tapes.append(self.attempt(first, target, exponent, found))
                # A fresh start that misses this target will hardly reach the lower ones.
                if tapes[-1].peak() > target:
                    fresh.remove(exponent)
            fitting = [tape for tape in tapes if tape.peak() <= target]
            missed = 0 if fitting else missed + 1
            # One miss can be bad luck of a greedy descent; two in a row hardly are.
            if missed == 2:
                break
            if fitting:
                last = min(fitting, key=lambda tape: (tape.seconds, tape.peak()))

    def fill(self) -> None:
        """Plan for finer targets, each from the plan for the one before, as far down as these are reached."""
        for base in self.bases[:1] if self.effort.between else ():
            last = self.tape(base)
            for target in self._targets_between():
                if target < last.peak():
                    last = self.attempt(last, target, EXPONENTS[0])
                    if last.peak() > target:
                        break

    def seeds(self) -> list[list[int]]:
        """The plans of other methods, but for those that an earlier one beats.

        Most are beaten, and a tape of thousands of runs takes milliseconds to make: they are judged without.
        """
        orders = (self.facts.order(*order) for order in seed_orders(self.graph))
        if not self.native:
            return list(orders)
        ladder, found = Ladder(), []
        for runs in orders:
            check_time()
            peak, seconds = judge(self.facts, runs)
            if ladder.improves(peak, seconds):
                ladder.add(Rung(peak, seconds, np.empty(0, dtype=np.int32)))
                found.append(runs)
        return found

    def plant(self, seeds: list[list[int]]) -> None:
        """Let the plans of other methods join."""
        for runs in seeds:
            if self.native and not self.ladder.improves(*judge(self.facts, runs)):
                continue
            tape = self.tape(runs)
            if self.ladder.improves(tape.peak(), tape.seconds):
                self.note(tape)
                if self.short(tape.order()):
                    tape.prune(tape.peak())
                    self.note(tape)
        for rung in [rung for rung in self.ladder if not self.short(rung.order)][:MOST_LONG]:
            tape = self.tape(rung.order)
            tape.prune(rung.peak, limit=4 * self.limit)
            self.note(tape)

    def graft(self) -> None:
        """Descend to each round target from the plans right above it, unless `down` has done just that."""
        missed = 0
        for target in self.targets:
            self.graft_to(target)
            missed = 0 if self.ladder.best(target) else missed + 1
            # What is out of reach takes longest, and all the more on large graphs.
            if missed == self.effort.patience:
                return

    def graft_to(self, target: int) -> None:
        """Descend to a target from the plans right above it."""
        above = [rung for rung in self.ladder if rung.peak > target and self.short(rung.order)]
        for rung in above[: self.effort.grafts]:
            if (rung.peak, rung.seconds, target, EXPONENTS[0]) not in self.tried:
                self.attempt(self.tape(rung.order), target, EXPONENTS[0])

    def sink(self) -> None:
        """Descend from plans all along the ladder to what lies between the smallest plan and the floor.

        Neighbours are much alike, and mostly miss alike: the plan that leads further down may be any.
        """
        rungs = [rung for rung in self.ladder if self.short(rung.order)]
        for rung in rungs[:: 1 + len(rungs) // self.effort.sinks] if self.effort.sinks else ():
            target = (self.least().peak + self.floor) // 2
            self.attempt(self.tape(rung.order), target, EXPONENTS[0])

    def short(self, runs: Sized) -> bool:
        """Whether an order is short enough to work on: plans near the floor may run all ops many times."""
        return len(runs) <= LONG * (len(self.graph.ops) + 1)

    def least(self) -> Rung:
        """The smallest plan that is short enough to work on."""
        return next(rung for rung in self.ladder if self.short(rung.order))

    def bisect(self) -> None:
        """Look for the smallest peak between the smallest plan and the floor."""
        missed = self.floor
        for _ in range(self.effort.bisections):
            least = self.least()
            target = (least.peak + missed) // 2
            if target >= least.peak:
                return
            start = self.tape(least.order)
            exponents = EXPONENTS[: 2 if self.effort.bisections > 1 else 1]
            found = min(self.attempt(start, target, exponent).peak() for exponent in exponents)
            if found > target:
                missed = max(target, missed)

    def up(self) -> None:
        """Fill the ladder between the targets: let go of recomputations as the budget grows."""
        first = self.least()
        low, found = first.peak, self.tape(first.order)
        for step in range(1, self.effort.fine):
            target = low + (self.top - low) * step // self.effort.fine
            found.prune(target)
            best = self.ladder.best(target)
            assert best is not None
            if best.seconds < found.seconds:
                found = self.tape(best.order)
                found.prune(target)
            self.note(found)

    def anneal(self, settled: Collection[int] = ()) -> None:
        """Change single runs at random, with the space that each rung has up to the next one.

        Budgets whose best plan is known already are left out.
        """
        once, ops = self.graph.seconds, len(self.graph.ops)
        heat = (HEAT[0] * once, HEAT[1] * once)
        for sweep in range(self.effort.sweeps):
            budgets = [budget for budget in self.tight_budgets() if budget not in settled]
            # All sweeps together stay within MOST_STEPS, however many rungs the ladder has.
            steps = min(STEPS * ops, MOST_STEPS // (len(budgets) * self.effort.sweeps + 1))
            for budget in budgets:
                start = self.ladder.best_or_smallest(budget)
                tape = self.native_tape(start.order)
                price = PRICES[sweep % len(PRICES)] * once / (max(ops, 1) * (self.top - budget))
                shifts = SHIFTS[sweep % len(SHIFTS)]
                tape.anneal(budget, steps=steps, price=price, heat=heat, shifts=shifts, seed=sweep)
                if tape.peak() <= budget:
                    tape.prune(budget)
                    self.note(tape)
            self.tell(0.9 + 0.1 * sweep / self.effort.sweeps)

    def tight_budgets(self) -> list[int]:
        """The largest budget for which each rung is the answer, largest first, and one below the smallest."""
        budgets = {rung.peak - 1 for rung in self.ladder if self.least_bytes < rung.peak <= self.top}
        return sorted(budgets, reverse=True)[:MOST_BUDGETS]
