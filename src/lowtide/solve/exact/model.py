"""The choice of what is recomputed as a mixed-integer linear programme in stages.

Problem: the fastest schedule under a budget whose first runs are in a given order.

Method: Jain et al., "Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization" (2020), over
values instead of ops and with the simulator's rules. Stage t ends with the first run of op t; before that,
earlier ops may be recomputed, each at most once and in order. Columns, all 0 or 1:

    R[t, i]     op i is recomputed in stage t, i < t
    X[t, i, v]  value v is there after the place of op i in stage t; one column from use to use of v
    Z[t, i, v]  op i writes in the place of value v in stage t; for the values that it takes

Between two uses nothing is gained by dropping a value, so X changes only where an op may read or write v,
and the end of a stage is the start of the next one. Rows:

    R[t, i] ≤ X before i, for each v that i reads;     X after i ≤ X before i (+ R[t, i] where i writes v)
    given and held bytes + Σ bytes X before i + (writes and workspace of i) R[t, i] - Σ bytes Z ≤ budget
    Z[t, i, v] ≤ 1 - X after i;     Σ Z[t, i, v] over v ≤ R[t, i]
    the same between forward and backward, with the tangents and the graph's `boundary`

L[t, i] says that op i is recomputed in stage t or later. While it is 1, the saved state of a random op takes
bytes. It also makes the relaxation as strong as a cut of `bound` at every stage's start:

    L[t, i] ≤ X at the start of t + L[t, w], for each v that i reads and its writer w; L[t, i] = 1 for i ≥ t

Left out are columns that cannot help: recomputing pinned ops, recomputing an op after the last use of all it
writes, a value after its last possible use, recomputing an op while the only value it writes is there.

Complexity: for n ops, at most n²/2 columns R and n times as many columns X as there are reads and writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...plans.graph import Graph, Op
from ...plans.order import first_order
from ...plans.schedule import Run, Schedule

__all__ = ["Row", "Stages", "Terms", "too_large"]

Terms = list[tuple[int, int]]

MOST_TERMS = 5_000_000
"""A programme with more terms than this, by a rough count, is not made: no solver would end on it."""


def too_large(graph: Graph) -> bool:
    """Whether the programme of a graph is beyond any search."""
    return len(graph.ops) ** 2 * sum(value.droppable for value in graph.values) // 2 > MOST_TERMS


@dataclass(frozen=True)
class Row:
    """The sum of coefficient times column is at most `limit`, plus the budget in a row of bytes."""

    terms: Terms
    limit: int
    in_bytes: bool = False


class Stages:
    """The programme of a graph: columns with their seconds and least values, and rows.

    `recomputed` and `later` have the columns R and L of (stage, op). While the rows are made, `there` has the
    column that says of each value whether it is there, and `fixed` the bytes that stay to the end.
    """

    def __init__(self, graph: Graph, order: tuple[list[str], list[str]] | None = None) -> None:
        self.graph = graph
        forward, backward = order or first_order(graph)
        self.split = len(forward)
        self.ops = [graph.op[name] for name in (*forward, *backward)]
        self.once = sum(op.seconds for op in self.ops)
        self.place = {op.name: place for place, op in enumerate(self.ops)}
        self.writer = {name: place for place, op in enumerate(self.ops) for name in op.writes}
        self.size = {value.name: value.bytes for value in graph.values}
        self.loose = {value.name for value in graph.values if value.droppable}
        self.seconds: list[float] = []
        self.least: list[int] = []
        self.rows: list[Row] = []
        self.last_use, self.last_recomputed = self.find_last_uses()
        self.add_runs()
        self.there: dict[str, int] = {}
        self.fixed = graph.fixed_bytes + graph.given_bytes
        for stage in range(len(self.ops)):
            if stage == self.split:
                self.cross_boundary()
            self.add_stage(stage)
        if self.split == len(self.ops):
            self.cross_boundary()

    def find_last_uses(self) -> tuple[dict[str, int], list[int]]:
        """The last stage in which each value may be read, and in which it helps to recompute each op."""
        last_use: dict[str, int] = {}
        last_recomputed = [-1] * len(self.ops)
        for place in range(len(self.ops) - 1, -1, -1):
            op = self.ops[place]
            if op.kind != "pinned":
                last_recomputed[place] = max(
                    (last_use.get(v, -1) for v in op.writes if v in self.loose), default=-1
                )
            for name in op.reads:
                last_use[name] = max(last_use.get(name, -1), place, last_recomputed[place])
        return last_use, last_recomputed

    def column(self, seconds: float = 0.0) -> int:
        self.seconds.append(seconds)
        self.least.append(0)
        return len(self.seconds) - 1

    def at_most(self, limit: int, terms: Terms, *, in_bytes: bool = False) -> None:
        self.rows.append(Row(terms, limit, in_bytes))

    def add_runs(self) -> None:
        """Columns for what is recomputed in a stage, and in that stage or a later one."""
        self.recomputed: dict[tuple[int, int], int] = {}
        self.later: dict[tuple[int, int], int] = {}
        for place, op in enumerate(self.ops):
            for stage in range(self.last_recomputed[place], place, -1):
                run = self.recomputed[stage, place] = self.column(op.seconds)
                later = self.later[stage, place] = self.column()
                later_runs = (
                    [(self.later[stage + 1, place], 1)] if stage < self.last_recomputed[place] else []
                )
                self.at_most(0, [(run, 1), (later, -1)])
                self.at_most(0, [(later, 1), (run, -1), *((column, -1) for column, _ in later_runs)])
                if later_runs:
                    self.at_most(0, [*later_runs, (later, -1)])

    def add_stage(self, stage: int) -> None:
        self.forget(stage)
        self.tighten(stage)
        for place in range(stage):
            if (stage, place) in self.recomputed:
                self.recompute(stage, place)
        self.run_first(stage)

    def tighten(self, stage: int) -> None:
        """What is read from this stage on is there now, or is recomputed from this stage on."""
        for place, op in enumerate(self.ops):
            reader = self.later.get((stage, place))
            if reader is None and place < stage:
                continue
            for name in sorted(self.loose.intersection(op.reads)):
                writer = self.writer.get(name, stage)
                if writer < stage:
                    sources = [self.there[name], self.later.get((stage, writer))]
                    terms = [(column, -1) for column in sources if column is not None]
                    self.at_most(*((-1, terms) if reader is None else (0, [*terms, (reader, 1)])))

    def forget(self, stage: int) -> None:
        """Values without a use from this stage on are not there."""
        self.there = {name: x for name, x in self.there.items() if self.last_use.get(name, -1) >= stage}

    def run_first(self, stage: int) -> None:
        op = self.ops[stage]
        for name in self.loose.intersection(op.reads):
            # A bound on the column instead of a row: the value must be there at the first run of its reader.
            self.least[self.there[name]] = 1
        present = self.present(stage, stage)
        self.change(op, None)
        self.fit(self.working_set(op), [*present, *self.in_place(op, None)])
        for name in op.writes:
            if name in self.loose:
                self.there[name] = self.column()
            else:
                self.fixed += self.size[name]

    def recompute(self, stage: int, place: int) -> None:
        op, run = self.ops[place], self.recomputed[stage, place]
        for name in sorted(self.loose.intersection(op.reads)):
            self.at_most(0, [(run, 1), (self.there[name], -1)])
        written = [name for name in op.writes if name in self.loose]
        # Recomputing what is there is useless; forbidding it cuts off many equal solutions.
        if len(written) == 1:
            self.at_most(1, [(run, 1), (self.there[written[0]], 1)])
        present = self.present(stage, place)
        self.change(op, run)
        self.fit(0, [*present, (run, self.working_set(op)), *self.in_place(op, run)])

    def in_place(self, op: Op, run: int | None) -> Terms:
        """What a run saves by writing in the place of a value that is gone after it."""
        columns = {name: self.column() for name in op.takes if self.size[name]}
        for name, column in columns.items():
            self.at_most(1, [(column, 1), (self.there[name], 1)])
        terms = [(column, 1) for column in columns.values()]
        if terms:
            self.at_most(*((1, terms) if run is None else (0, [*terms, (run, -1)])))
        return [(column, -self.size[name]) for name, column in columns.items()]

    def change(self, op: Op, run: int | None) -> None:
        """After a use a value may be dropped, and it is there if it was there or was written."""
        for name in (*op.reads, *op.writes):
            if name in self.there:
                before, after = self.there[name], self.column()
                terms = [(after, 1), (before, -1)]
                if name in op.writes and run is not None:
                    terms.append((run, -1))
                self.at_most(0, terms)
                self.there[name] = after

    def cross_boundary(self) -> None:
        self.forget(self.split)
        tangents = [value for value in self.graph.values if value.kind == "tangent"]
        size = self.graph.boundary + sum(value.bytes for value in tangents)
        self.fit(size, self.present(self.split, -1))
        for value in tangents:
            if value.name not in self.loose:
                self.fixed += value.bytes
            elif value.name in self.last_use:
                self.there[value.name] = self.column()

    def working_set(self, op: Op) -> int:
        return op.workspace + sum(self.size[name] for name in op.writes)

    def present(self, stage: int, place: int) -> Terms:
        """The values and random states that may be there before the place of an op in a stage."""
        terms = [(x, self.size[name]) for name, x in self.there.items()]
        for index, op in enumerate(self.ops[: stage + 1]):
            if op.state and (index < stage or place == stage):
                state = self.later.get((stage if place <= index < stage else stage + 1, index))
                terms += [(state, op.state)] if state is not None else []
        return terms

    def fit(self, size: int, terms: Terms) -> None:
        self.at_most(-self.fixed - size, [(x, b) for x, b in terms if b], in_bytes=True)

    def order(self, chosen: Sequence[float]) -> tuple[list[str], list[str]]:
        """The forward and backward runs of a solution."""
        stages: list[list[int]] = [[] for _ in self.ops]
        for (stage, place), column in self.recomputed.items():
            if chosen[column] > 0.5:
                stages[stage].append(place)
        names = [[self.ops[i].name for i in (*sorted(again), stage)] for stage, again in enumerate(stages)]
        return [n for part in names[: self.split] for n in part], [
            n for part in names[self.split :] for n in part
        ]

    def choices(self, schedule: Schedule) -> dict[int, float] | None:
        """The columns of what a schedule recomputes, or None when it does not go in stages."""
        chosen = dict.fromkeys(self.recomputed.values(), 0.0)
        stage, last = 0, -1
        for place in (self.place[step.op] for step in schedule.steps if isinstance(step, Run)):
            if place == stage:
                stage, last = stage + 1, -1
            elif place > last and (stage, place) in self.recomputed:
                chosen[self.recomputed[stage, place]], last = 1.0, place
            else:
                return None
        return chosen
