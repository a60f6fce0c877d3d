"""How far `auto` is from the optimum on small graphs: random steps and captured blocks, all orders of runs.

    python benchmarks/optimality.py [--cases 500]    # goes on where it stopped
    python benchmarks/optimality.py --summary        # of the rows that are there

For each graph: the smallest peak that any order of runs reaches, against that of `auto`; and at a budget
between that and the natural peak the fewest seconds, against those of `auto`. Both optima are proven by
`any_order`, the search over all orders, or by `lower_bound`; cases that it does not close within its work are
counted, and left out of the comparison. One JSON line per case in `results/optimality.jsonl`, as they come.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import nn

import lowtide
from commit import commit
from lowtide.plans.graph import Graph
from lowtide.plans.keep_all import keep_all
from lowtide.plans.simulator import simulate
from lowtide.solve import auto
from lowtide.solve.bound import lower_bound
from lowtide.solve.search.any_order import AnyOrder
from lowtide.solve.search.tape import Facts
from synthetic import branched_step, random_step

RESULTS = Path(__file__).parent / "results" / "optimality.jsonl"
WORK, SMALLEST_WORK = 40_000_000, 10_000_000
"""Of the search over all orders, for the fewest seconds and for each step towards the smallest peak."""

SHARES = (0.1, 0.25, 0.5, 0.75)
ROUNDING = 1e-9


class Residual(nn.Module):
    """Two convolutions with normalisation around a skip, and the loss: a slice of a ResNet."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + x).mean()


class Block(nn.Module):
    """Attention and an MLP around skips, and the loss: a slice of a transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU())
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v))
        return (x + self.down(self.mlp(x))).square().mean()


def captured() -> Iterator[tuple[str, Graph]]:
    """Small steps as torch records them."""
    mlp = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 8))
    cnn = nn.Sequential(nn.Conv2d(8, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 16, 3), nn.SiLU())
    deep = nn.Sequential(*(layer for _ in range(5) for layer in (nn.Linear(64, 64), nn.Sigmoid())))
    steps = {
        "mlp": (mlp, torch.ones(256, 64)),
        "deep": (deep, torch.ones(512, 64)),
        "cnn": (cnn, torch.ones(8, 8, 16, 16)),
        "residual": (Residual(16), torch.ones(8, 16, 16, 16)),
        "block": (Block(64), torch.ones(8, 32, 64)),
    }
    for name, (model, batch) in steps.items():
        yield name, lowtide.plan(model, batch, device="H200").graph


def cases(count: int) -> Iterator[tuple[str, Graph, float]]:
    """Names, graphs, and where the budget lies from the smallest peak (0) to the natural one (1)."""
    for name, graph in captured():
        for share in (0.1, 0.3, 0.5, 0.7):
            yield f"{name} {share}", graph, share
    for seed in range(count - 20):
        make = branched_step if seed % 2 else random_step
        yield f"{make.__name__} {seed}", make(seed, 6 + seed % 7), Random(seed).choice(SHARES)


def compare(name: str, graph: Graph, share: float) -> dict[str, Any]:
    """What `auto` and the search over all orders reach."""
    row = {"case": name, "ops": len(graph.ops), "commit": commit()}
    facts = Facts(graph)
    if not AnyOrder.handles(facts):
        return {**row, "too_large": True}
    orders = AnyOrder(facts)
    natural, smallest = (simulate(graph, schedule).peak for schedule in (keep_all(graph), auto(graph, 0)))
    least, proven = smallest_peak(orders, smallest)
    budget = int(least + (natural - least) * share)
    found = simulate(graph, auto(graph, budget))
    fits = found.peak <= budget
    limit = found.again - ROUNDING * found.seconds if fits else math.inf
    best = orders.fastest(budget, limit=limit, work=WORK)
    once = found.seconds - found.again
    optimum = once + best.seconds if best.order else found.seconds
    return {
        **row,
        **{"natural": natural, "smallest": smallest, "least": least, "least_proven": proven},
        **{"budget": budget, "auto": found.seconds if fits else None},
        **{"optimum": optimum if best.complete else None, "closed": best.complete},
    }


def smallest_peak(orders: AnyOrder, start: int) -> tuple[int, bool]:
    """The smallest peak that was found, and whether no order has a smaller one."""
    graph = orders.facts.graph
    while lower_bound(graph, start - 1) < math.inf:
        found = orders.fitting(start - 1, work=SMALLEST_WORK)
        if found.order is None:
            return start, found.complete
        start = simulate(graph, orders.facts.schedule(found.order)).peak
    return start, True


def summary(lines: list[dict[str, Any]]) -> str:
    rows = [line for line in lines if "too_large" not in line]
    closed = [row for row in rows if row["closed"]]
    ratios = [row["auto"] / row["optimum"] - 1 if row["auto"] else math.inf for row in closed]
    equal = sum(ratio < ROUNDING for ratio in ratios)
    sizes = [row["ops"] for row in rows]
    floors = [row for row in rows if row["least_proven"]]
    same = sum(row["smallest"] == row["least"] for row in floors)
    larger = max((row["smallest"] / row["least"] - 1 for row in floors), default=0.0)
    return (
        f"{len(rows)} cases of {min(sizes)} to {max(sizes)} ops, {len(lines) - len(rows)} more too large\n"
        f"seconds: {len(closed)} closed by the search over all orders, auto equal on {equal} "
        f"({equal / len(closed):.1%}), at worst +{max(ratios):.2%}\n"
        f"smallest peak: {len(floors)} closed, auto equal on {same} ({same / len(floors):.1%}), "
        f"at worst +{larger:.2%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--out", type=Path, default=RESULTS, help="the file of results")
    parser.add_argument("--summary", action="store_true", help="of the results that are there")
    args = parser.parse_args()
    lines = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []
    known = {line["case"] for line in lines}
    for case in () if args.summary else cases(args.cases):
        if case[0] not in known:
            lines.append(compare(*case))
            with args.out.open("a") as file:
                file.write(json.dumps(lines[-1]) + "\n")
    print(summary(lines))


if __name__ == "__main__":
    main()
