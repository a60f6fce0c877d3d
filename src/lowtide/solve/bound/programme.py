"""Several moments of a step in one integer programme, whose least seconds no schedule is below.

Problem: one moment does not see what has to be recomputed before it, nor that two moments are tight for
different reasons.

Method: the moments are the end of the forward and the first runs of some backward ops, each of which depends
on the one before: m(0), m(1), ... In span k, which ends at m(k), op o runs if r[o, k]; value v is there at
m(k) if s[v, k]. Of any schedule it is true that

    r[o, k] ≤ s[v, k - 1] + r[w, k]      for each v that o reads, and the op w that writes it
    s[v, k] ≤ s[v, k - 1] + r[w, k]
    Σ bytes s[v, k] + bytes that are there at m(k) in any case ≤ budget

and its seconds are at least Σ seconds r[o, k]. All columns are 0 or 1, all rows `Σ factor · column ≤ most` in
whole numbers, seconds in `UNITS`, rounded down. `settle` fixes the columns that have one value only.

Limits: random states that recomputed ops save are not counted.
"""

from __future__ import annotations

from collections.abc import MutableSequence
from dataclasses import dataclass, field

from .moments import RequiredOps, end_of_forward, first_run

__all__ = ["Bounds", "Programme", "Row", "of_moments"]

Bounds = MutableSequence[int]
"""The least, or the most, of each column."""


@dataclass(frozen=True)
class Row:
    """The sum of factors times columns is at most `most`."""

    factors: dict[int, int]
    most: int

    def least(self, low: Bounds, high: Bounds) -> int:
        """The least that the sum can be."""
        return sum(a * (low[j] if a > 0 else high[j]) for j, a in self.factors.items())

    def without(self, low: Bounds, high: Bounds) -> Row:
        """The row of the columns that are not fixed."""
        fixed = sum(a * low[j] for j, a in self.factors.items() if low[j] == high[j])
        return Row({j: a for j, a in self.factors.items() if low[j] < high[j]}, self.most - fixed)


@dataclass
class Programme:
    """Columns with a cost, from `low` to `high`; `budgets` are the numbers of the rows of bytes."""

    cost: list[int] = field(default_factory=list)
    low: list[int] = field(default_factory=list)
    high: list[int] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    budgets: list[int] = field(default_factory=list)

    def column(self, low: int = 0, high: int = 1, cost: int = 0) -> int:
        self.cost.append(cost)
        self.low.append(low)
        self.high.append(high)
        return len(self.cost) - 1

    def add(self, factors: dict[int, int], most: int) -> None:
        self.rows.append(Row(factors, most))

    def settle(self, low: Bounds, high: Bounds) -> bool:
        """Fix, in these bounds, what a row leaves no choice; False if a row cannot be kept."""
        rows_of: list[list[int]] = [[] for _ in self.cost]
        for number, row in enumerate(self.rows):
            for j in row.factors:
                rows_of[j].append(number)
        short, long = set(range(len(self.rows))) - {*self.budgets}, {*self.budgets}
        while short or long:
            # The rows of bytes have almost all columns: only when nothing else is to be done.
            number = short.pop() if short else long.pop()
            row = self.rows[number]
            spare = row.most - row.least(low, high)
            if spare < 0:
                return False
            for j, a in row.factors.items():
                if low[j] < high[j] and abs(a) > spare:
                    low[j] = high[j] = low[j] if a > 0 else high[j]
                    short.update(rows_of[j])
            long |= short.intersection(self.budgets)
            short.difference_update(self.budgets)
        return True

    def settled(self) -> tuple[Programme, int] | None:
        """The programme of the columns with a choice, and the cost of the others; None if nothing fits."""
        low, high = self.low.copy(), self.high.copy()
        if not self.settle(low, high):
            return None
        open_columns = [j for j in range(len(low)) if low[j] < high[j]]
        number = {j: new for new, j in enumerate(open_columns)}
        less = Programme([self.cost[j] for j in open_columns], [0] * len(number), [1] * len(number))
        for index, row in enumerate(self.rows):
            rest = row.without(low, high)
            if sum(a for a in rest.factors.values() if a > 0) > rest.most:
                if index in self.budgets:
                    less.budgets.append(len(less.rows))
                less.add({number[j]: a for j, a in rest.factors.items()}, rest.most)
        fixed = sum(c * lo for c, lo, hi in zip(self.cost, low, high, strict=True) if lo == hi)
        return less, fixed


def of_moments(step: RequiredOps, budget: int, starts: list[int]) -> Programme:
    """The programme of the end of the forward and the first runs of `starts`, each needed by the next."""
    return _Builder(step, budget, starts).programme


class _Builder:
    def __init__(self, step: RequiredOps, budget: int, starts: list[int]) -> None:
        self.step, self.starts = step, starts
        self.programme = Programme()
        self.moments = [end_of_forward(step), *(first_run(step, start) for start in starts)]
        self.spans = range(len(self.moments) + 1)
        self.runs = [[self.run(op, k) for k in self.spans] for op in range(len(step.ops))]
        self.there: list[dict[str, int]] = []
        for k in self.spans[:-1]:
            self.there.append(self.values(k))
            self.keep_to(budget, k)
        for op in range(len(step.ops)):
            self.find_reads(op)

    def run(self, op: int, k: int) -> int:
        """Whether an op runs in a span: a first run begins the span after its moment."""
        one = self.step.ops[op]
        too_early = any(self.moments[j].after[op] or [op] == self.starts[j - 1 : j] for j in self.spans[k:-1])
        may = not too_early and (k > 0 or one.phase == "forward")
        must = may and (self.step.early[op] if k == 0 else k > 1 and self.starts[k - 2] == op)
        return self.programme.column(int(must), int(may), self.step.units[op])

    def values(self, k: int) -> dict[str, int]:
        """Whether each value is there at a moment."""
        found = {}
        reads = self.moments[k].there.intersection(self.step.ops[self.starts[k - 1]].reads) if k else ()
        for value in self.step.graph.values:
            writer = self.step.writer.get(value.name)
            if value.droppable and writer is not None:
                found[value.name] = self.programme.column(low=int(value.name in reads))
                before = {self.there[k - 1][value.name]: -1} if k else {}
                self.programme.add({found[value.name]: 1, self.runs[writer][k]: -1, **before}, 0)
        return found

    def keep_to(self, budget: int, k: int) -> None:
        moment, value = self.moments[k], self.step.graph.value
        counted = [n for n in self.there[k] if n not in moment.there and n not in moment.settled]
        factors = {self.there[k][name]: value[name].bytes for name in counted if value[name].bytes}
        for index, op in enumerate(self.step.ops):
            if held := self.step.held_bytes(op):
                ran = self.programme.column()
                factors[ran] = held
                for earlier in self.runs[index][: k + 1]:
                    self.programme.add({earlier: 1, ran: -1}, 0)
        self.programme.budgets.append(len(self.programme.rows))
        # A first run has made place for all that it writes, also for what stays.
        written = self.step.held_bytes(self.step.ops[self.starts[k - 1]]) if k else 0
        self.programme.add(factors, budget - moment.size - written)

    def find_reads(self, op: int) -> None:
        one, mine = self.step.ops[op], self.runs[op]
        self.programme.add(dict.fromkeys(mine, -1), -1)
        if one.kind == "pinned":
            self.programme.add(dict.fromkeys(mine, 1), 1)
        for name in one.reads:
            writer = self.step.writer.get(name)
            if writer is None:
                continue
            for k in self.spans:
                sources = [*self.found_at(name, op, k), self.runs[writer][k]]
                self.programme.add({mine[k]: 1, **dict.fromkeys(sources, -1)}, 0)

    def found_at(self, name: str, op: int, k: int) -> list[int]:
        """Where an op of span k may find a value besides in that span."""
        runs = self.runs[self.step.writer[name]]
        if not self.step.graph.value[name].droppable:
            return runs[:k]
        # A first run may write in the place of what it reads, which is there until its moment alone.
        if k > 1 and self.starts[k - 2] == op and name not in self.moments[k - 1].there:
            return [self.there[k - 2][name], runs[k - 1]]
        return [self.there[k - 1][name]] if k else []
