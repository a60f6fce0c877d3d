"""What several moments of a step say together, in whole numbers: a closer bound than that of one moment.

    python benchmarks/bound_moments.py            # a line per case in results/bound_moments.jsonl

`lower_bound` looks at one moment at a time. Here the end of the forward and the first runs of some backward
ops, each of which depends on the one before, are put into one programme for HiGHS. In span k, between moments
k - 1 and k, op o runs if r[o, k]; value v is there at moment k if s[v, k]:

    r[o, k] ≤ s[v, k - 1] + r[w, k]      for each v that o reads, and the op w that writes it
    s[v, k] ≤ s[v, k - 1] + r[w, k]
    Σ bytes s[v, k] + bytes that are there at moment k in any case ≤ budget

Its least seconds are below those of every schedule: `relaxed`, with parts of values and runs, and in whole
numbers as far as that is `proven` in `--limit` seconds, by a solver that has tolerances. Needs `highspy`.
"""

from __future__ import annotations

import argparse
import json
from math import inf
from pathlib import Path

import highspy
import numpy as np

from commit import commit
from corpus import load
from lowtide.plans.graph import Graph
from lowtide.plans.keep_all import keep_all
from lowtide.plans.simulator import simulate
from lowtide.solve import auto
from lowtide.solve.bound.method import CutNetwork, _extra, bound_by_moments
from lowtide.solve.bound.moments import RequiredOps, _end_of_forward, _first_run
from synthetic import encoder_decoder

RESULTS = Path(__file__).parent / "results" / "bound_moments.jsonl"
CASES = (
    ("encoder_decoder", 50, (1, 4, 24)),
    ("vit_b16", 25, (1, 4)),
    ("resnet50", 25, (1, 4)),
    ("googlenet", 25, (1, 4)),
    ("resnet152", 25, (1, 4)),
)
"""Graphs, budgets in percent of the natural peak, and numbers of first runs."""


class Programme:
    """The programme of some moments: the end of the forward, and the first runs of the ops `starts`."""

    def __init__(self, step: RequiredOps, budget: int, starts: list[int]) -> None:
        self.step, self.starts = step, starts
        self.moments = [_end_of_forward(step), *(_first_run(step, start) for start in starts)]
        self.spans = range(len(self.moments) + 1)
        self.solver = highspy.Highs()
        self.solver.setOptionValue("output_flag", False)
        self.columns = 0
        self.runs = [[self.run(op, k) for k in self.spans] for op in range(len(step.ops))]
        self.there: list[dict[str, int]] = []
        for k in self.spans[:-1]:
            self.there.append(self.values(k))
            self.keep_to(budget, k)
        for op in range(len(step.ops)):
            self.find_reads(op)

    def column(self, low: float = 0, high: float = 1, seconds: float = 0) -> int:
        self.solver.addVar(low, high)
        self.solver.changeColCost(self.columns, seconds)
        self.columns += 1
        return self.columns - 1

    def row(self, terms: dict[int, float], high: float, low: float = -inf) -> None:
        columns, factors = np.array([*terms], dtype=np.int32), np.array([*terms.values()], dtype=float)
        self.solver.addRow(low, high, len(terms), columns, factors)

    def run(self, op: int, k: int) -> int:
        """Whether an op runs in a span: a first run begins the span after its moment."""
        one = self.step.ops[op]
        too_early = any(self.moments[j].after[op] or [op] == self.starts[j - 1 : j] for j in self.spans[k:-1])
        may = not too_early and (k > 0 or one.phase == "forward")
        must = may and (self.step.early[op] if k == 0 else [op] == self.starts[k - 2 : k - 1] and k > 1)
        return self.column(int(must), int(may), one.seconds / self.step.once)

    def values(self, k: int) -> dict[str, int]:
        """Whether each value is there at a moment."""
        found = {}
        reads = self.moments[k].there.intersection(self.step.ops[self.starts[k - 1]].reads) if k else ()
        for value in self.step.graph.values:
            writer = self.step.writer.get(value.name)
            if value.droppable and writer is not None:
                found[value.name] = self.column(low=int(value.name in reads))
                before = {self.there[k - 1][value.name]: -1} if k else {}
                self.row({found[value.name]: 1, self.runs[writer][k]: -1, **before}, 0)
        return found

    def keep_to(self, budget: int, k: int) -> None:
        moment, size = self.moments[k], self.step.graph.value
        counted = [n for n in self.there[k] if n not in moment.there and n not in moment.settled]
        terms = {self.there[k][name]: size[name].bytes / budget for name in counted}
        for index, op in enumerate(self.step.ops):
            if held := self.step.held_bytes(op):
                ran = self.column()
                terms[ran] = held / budget
                for earlier in self.runs[index][: k + 1]:
                    self.row({earlier: 1, ran: -1}, 0)
        self.row(terms, 1 - moment.size / budget)

    def find_reads(self, op: int) -> None:
        one, mine = self.step.ops[op], self.runs[op]
        self.row(dict.fromkeys(mine, 1), 1 if one.kind == "pinned" else inf, 1)
        for k in self.spans:
            for name in one.reads:
                if (writer := self.step.writer.get(name)) is None:
                    continue
                if self.step.graph.value[name].droppable:
                    there = [self.there[k - 1][name]] if k else []
                else:
                    there = self.runs[writer][:k]
                # A first run may write in the place of what it reads, which is there until its moment alone.
                first = k > 1 and self.starts[k - 2] == op
                if first and self.step.graph.value[name].droppable and name not in self.moments[k - 1].there:
                    there = [self.there[k - 2][name], self.runs[writer][k - 1]]
                self.row({mine[k]: 1, **dict.fromkeys([*there, self.runs[writer][k]], -1)}, 0)

    def least(self, limit: float, *, whole: bool) -> highspy.HighsInfo:
        kind = highspy.HighsVarType.kInteger if whole else highspy.HighsVarType.kContinuous
        for column in range(self.columns):
            self.solver.changeColIntegrality(column, kind)
        self.solver.setOptionValue("time_limit", self.solver.getRunTime() + limit)
        self.solver.run()
        return self.solver.getInfo()


def tightest(step: RequiredOps, budget: int, count: int) -> list[int]:
    """Backward ops that depend on each other, around the one whose first run alone bounds most."""
    backward = [index for index, op in enumerate(step.ops) if op.phase == "backward"]
    best = max(backward, key=lambda op: _extra(CutNetwork(step, _first_run(step, op)), budget, 0) or 0)
    chain: list[int] = []
    for op in backward:
        later = step.depending_on(op)
        follows = not chain or step.depending_on(chain[-1])[op]
        if follows and (op == best or (later[best] if op < best else any(later))):
            chain.append(op)
    start = max(min(chain.index(best) - count // 2, len(chain) - count), 0)
    return chain[start : start + count]


def compare(name: str, graph: Graph, share: int, count: int, limit: float) -> dict[str, object]:
    whole = simulate(graph, keep_all(graph))
    budget = whole.peak * share // 100
    found = simulate(graph, auto(graph, budget))
    step = RequiredOps(graph)
    starts = tightest(step, budget, count)
    programme = Programme(step, budget, starts)
    relaxed = programme.least(limit, whole=False).objective_function_value
    begun = programme.solver.getRunTime()
    info = programme.least(limit, whole=True)
    return {
        **{"graph": name, "ops": len(graph.ops), "budget": share, "first_runs": len(starts)},
        "auto": found.seconds / whole.seconds - 1 if found.peak <= budget else None,
        "bound": bound_by_moments(graph, budget) / whole.seconds - 1,
        **{"relaxed": relaxed - 1, "proven": info.mip_dual_bound - 1},
        "found": info.objective_function_value - 1,
        **{"solver_seconds": programme.solver.getRunTime() - begun, "commit": commit()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit", type=float, default=60.0, help="seconds of the solver for each programme")
    parser.add_argument("--only", nargs="+", choices=[name for name, _, _ in CASES])
    args = parser.parse_args()
    for name, share, counts in CASES:
        if args.only and name not in args.only:
            continue
        graph = encoder_decoder() if name == "encoder_decoder" else load(name)
        for count in counts:
            row = compare(name, graph, share, count, args.limit)
            print(row, flush=True)
            with RESULTS.open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
