"""How far `auto` is from the optimum on small graphs: random steps and captured blocks, against `exact`.

    python benchmarks/optimality.py [--cases 240]

Writes one JSON line per case to `results/optimality.jsonl` and prints a summary. Cases that the exact solver
does not close within its time limit are counted, and left out of the comparison.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import nn

import lowtide
from lowtide.plans import keep_all
from lowtide.plans.graph import Graph
from lowtide.plans.simulator import simulate
from lowtide.solve import auto
from lowtide.solve.exact import solve_exact
from synthetic import random_step

RESULTS = Path(__file__).parent / "results" / "optimality.jsonl"
SECONDS = 30.0


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
    """Names, graphs, and where the budget lies from the smallest peak found (0) to the natural one (1)."""
    for name, graph in captured():
        for share in (0.1, 0.3, 0.5, 0.7):
            yield name, graph, share
    chance = Random(0)
    for seed in range(count - 20):
        yield f"random {seed}", random_step(seed, 3 + seed % 8), chance.choice((0.1, 0.25, 0.5, 0.75))


def compare(name: str, graph: Graph, share: float) -> dict[str, Any]:
    """What `auto` and `exact` reach at one budget."""
    top, low = (simulate(graph, schedule).peak for schedule in (keep_all(graph), auto(graph, 0)))
    budget = int(low + (top - low) * share)
    found = simulate(graph, auto(graph, budget)).seconds
    best = solve_exact(graph, budget, seconds_limit=SECONDS)
    line = {"case": name, "ops": len(graph.ops), "budget": budget, "natural": top, "smallest": low}
    return {**line, "auto": found, "exact": best.seconds, "closed": best.optimal}


def summary(lines: list[dict[str, Any]]) -> str:
    closed = [line for line in lines if line["closed"]]
    ratios = [line["auto"] / line["exact"] - 1 for line in closed]
    equal = sum(ratio < 1e-9 for ratio in ratios)
    sizes = [line["ops"] for line in lines]
    return (
        f"{len(lines)} cases of {min(sizes)} to {max(sizes)} ops, {len(closed)} closed by the exact solver\n"
        f"auto equal or better on {equal} ({equal / len(closed):.1%}), at worst +{max(ratios):.2%}\n"
        f"better than exact, by another order of first runs, on {sum(ratio < -1e-9 for ratio in ratios)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=240)
    lines = []
    for case in cases(parser.parse_args().cases):
        lines.append(compare(*case))
        RESULTS.write_text("".join(json.dumps(line) + "\n" for line in lines))
    print(summary(lines))


if __name__ == "__main__":
    main()
