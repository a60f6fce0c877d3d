"""The methods that `plans.py` compares: what each does on a graph of the corpus, as a row of the results.

A method is asked for a plan at each budget and for the smallest peak; what it answers is judged by the
simulator. Its *extra* at a budget is the least of all its judged plans that fit there, so that a plan found
for a smaller budget counts as well; its *floor* is the smallest peak of all. `seconds` are those of the first
budget alone, in a fresh process.

"quick" is no method of its own but the descents with which `auto` begins; `auto` must not be behind it
either. Two methods have no budget: a checkpoint around every block is one plan, torch's partitioner gives
one for each of its own budgets.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch._functorch import partitioners

from corpus import CORPUS, DEVICE, PAPER, load
from lowtide.errors import LowtideError
from lowtide.planner.per_block import per_block_schedule
from lowtide.plans.graph import Graph
from lowtide.plans.keep_all import keep_all
from lowtide.plans.schedule import Schedule
from lowtide.plans.simulator import simulate
from lowtide.solve import METHODS
from lowtide.solve.bound import lower_bound
from lowtide.solve.quick import quick, smallest
from lowtide.solve.search.tape import Facts
from plan_results import BETWEEN, BOUND, SHARES, Row
from torch_budget import BUDGETS, torch_budget_schedules

__all__ = ["ROWS", "rows"]

FLOOR = 0
ASKED = (50, FLOOR, 25, 35, 70, *BETWEEN)
"""The budgets in the order in which a method is asked: the most telling first, should time run out."""

LOWER_SETS = ("lower_sets", "lower_sets_approximate")
SOLVERS = ("auto", "quick", *LOWER_SETS, "chain", "sequence", "rotor", "sqrt_segments")


class Judged:
    """The plans of a method on a graph, as (peak, extra) pairs."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.plans: list[tuple[int, float]] = []

    def add(self, schedule: Schedule) -> None:
        timeline = simulate(self.graph, schedule)
        self.plans.append((timeline.peak, timeline.extra))

    def extra(self, budget: int) -> float | None:
        return min((extra for peak, extra in self.plans if peak <= budget), default=None)

    def answer(self, row: Row, shares: tuple[int, ...]) -> Row:
        """The row with what these budgets get."""
        floor, floor_extra = min(self.plans) if FLOOR in shares else (None, None)
        extra = {str(share): self.extra(budget_of(row, share)) for share in shares if share != FLOOR}
        return replace(row, floor=floor, floor_extra=floor_extra, extra=extra)


def budget_of(row: Row, share: int) -> int:
    return row.vanilla * share // 100


def shares_of(name: str, method: str) -> tuple[int, ...]:
    """The budgets of a method; `auto` is also asked for what the paper reached."""
    paper = (100 - PAPER[name].best_saved,) if method == "auto" and name in PAPER else ()
    return tuple(dict.fromkeys((*ASKED, *paper)))


def rows(name: str, method: str) -> Iterator[Row]:
    """The row of a method on a graph, again and again, each time with one more budget."""
    graph = load(name)
    vanilla = simulate(graph, keep_all(graph)).peak
    row = Row(name, method, len(graph.ops), vanilla, prices=graph.prices, torch=torch.__version__)
    yield row
    try:
        yield from ROWS[method](graph, row)
    except LowtideError as error:
        yield replace(row, reason=str(error))


def quick_schedule(graph: Graph, budget: int) -> Schedule:
    """A quick look as a method: the smallest plan for a budget of 0."""
    rung = quick(graph, budget) if budget else smallest(graph)
    return Facts(graph).schedule(rung.order.tolist())


def solved(graph: Graph, row: Row) -> Iterator[Row]:
    judged = Judged(graph)
    method = quick_schedule if row.method == "quick" else METHODS[row.method]
    shares = shares_of(row.graph, row.method)
    for count, share in enumerate(shares, start=1):
        start = time.process_time()
        schedule = method(graph, budget_of(row, share))
        if row.seconds is None:
            row = replace(row, seconds=time.process_time() - start)
        judged.add(schedule)
        yield judged.answer(row, shares[:count])


def bounded(graph: Graph, row: Row) -> Iterator[Row]:
    once = simulate(graph, keep_all(graph)).seconds
    for share in sorted(SHARES, key=ASKED.index):
        start = time.process_time()
        least = lower_bound(graph, budget_of(row, share)) / once - 1
        if row.seconds is None:
            row = replace(row, seconds=time.process_time() - start)
        row = replace(row, extra={**row.extra, str(share): "inf" if least == math.inf else max(least, 0.0)})
        yield row


def per_block(graph: Graph, row: Row) -> Iterator[Row]:
    start = time.process_time()
    schedule = per_block_schedule(graph)
    row = replace(row, seconds=time.process_time() - start)
    if schedule is None:
        raise LowtideError("no blocks")
    judged = Judged(graph)
    judged.add(schedule)
    yield judged.answer(row, ASKED)


def torch_budget(graph: Graph, row: Row) -> Iterator[Row]:
    """Torch's own partitions; the seconds are those of its partitioner for one of its budgets."""
    clock = Clock(partitioners.min_cut_rematerialization_partition)
    with torch.device("meta"):
        model, batch = CORPUS[row.graph].build()
    with patch.object(partitioners, "min_cut_rematerialization_partition", clock):
        found, schedules = torch_budget_schedules(model, batch, DEVICE, BUDGETS)
    if found != graph:
        raise LowtideError(f"{row.graph} is traced differently now; run benchmarks/corpus.py --again")
    if not schedules:
        raise LowtideError(schedules.reason)
    judged = Judged(graph)
    for schedule in schedules.values():
        judged.add(schedule)
    yield judged.answer(replace(row, seconds=clock.seconds / len(schedules)), ASKED)


class Clock:
    """A function that counts the seconds of its calls."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.seconds = 0.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        start = time.process_time()
        try:
            return self.function(*args, **kwargs)
        finally:
            self.seconds += time.process_time() - start


ROWS: dict[str, Callable[[Graph, Row], Iterator[Row]]] = {
    **dict.fromkeys(SOLVERS, solved),
    "per_block": per_block,
    "torch_budget": torch_budget,
    BOUND: bounded,
}
"""What makes the rows of each method."""
