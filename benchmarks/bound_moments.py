"""How close the proven bound comes: one moment alone against several moments together, in whole numbers.

    python benchmarks/bound_moments.py            # a line per network in results/bound_moments.jsonl
    python benchmarks/bound_moments.py --only vit_b16 --share 35

For each network of the corpus of which `auto` has a plan at a share of the natural peak: extra times of that
plan, of the bound from single moments and of `lower_bound`, how far the plan is from each at most, and the
seconds of the CPU of both bounds. Needs `highspy`. The last lines of the output are the medians of the gaps.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median

import highspy

from commit import commit
from corpus import load, names
from lowtide.plans.graph import Graph
from lowtide.plans.keep_all import keep_all
from lowtide.plans.simulator import simulate
from lowtide.solve import auto
from lowtide.solve.bound import lower_bound
from lowtide.solve.bound.method import bound_by_moments

RESULTS = Path(__file__).parent / "results" / "bound_moments.jsonl"

Row = dict[str, str | int | float]


def compare(name: str, graph: Graph, share: int) -> Row | None:
    """The row of a network, or None where `auto` has no plan."""
    whole = simulate(graph, keep_all(graph))
    budget = whole.peak * share // 100
    found = simulate(graph, auto(graph, budget))
    if found.peak > budget:
        return None
    begun = time.process_time()
    one = bound_by_moments(graph, budget)
    between = time.process_time()
    several = lower_bound(graph, budget)
    ended = time.process_time()
    return {
        **{"graph": name, "ops": len(graph.ops), "budget": share, "auto": found.seconds / whole.seconds - 1},
        **{"one_moment": one / whole.seconds - 1, "bound": several / whole.seconds - 1},
        **{"gap_to_one": found.seconds / one - 1, "gap": found.seconds / several - 1},
        **{"one_seconds": between - begun, "seconds": ended - between},
        **{"highspy": highspy.Highs().version(), "commit": commit()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=names(), default=names())
    parser.add_argument("--share", type=int, default=25, help="the budget in percent of the natural peak")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the file of results, written anew")
    args = parser.parse_args()
    rows: list[Row] = []
    for name in args.only:
        row = compare(name, load(name), args.share)
        if row is not None:
            print(row, flush=True)
            rows.append(row)
            args.out.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    for gap in ("gap_to_one", "gap") if rows else ():
        print(f"median {gap}: {median(float(row[gap]) for row in rows):.4%}")


if __name__ == "__main__":
    main()
