"""Look at a plan from all sides: what it keeps, what it recomputes, what other caps would cost.

python examples/walk_through_a_plan.py
"""

import tempfile
from collections import Counter
from pathlib import Path

import torch
from torch import nn

import lowtide


def main() -> None:
    # A step to look at: eight layers, with the loss inside.
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)) for _ in range(8))
    net = nn.Sequential(*layers)

    def step(x: torch.Tensor) -> torch.Tensor:
        return net(x).square().mean()

    x = torch.randn(1024, 128)

    # The graph: every op of the forward and the backward, and every value that is in memory.
    whole = lowtide.plan(step, x)
    print(whole.graph)

    # A plan: a schedule of runs and drops under a budget, and what it comes to.
    plan = lowtide.plan(step, x, budget=int(0.5 * whole.peak))
    print(f"\npeak {plan.peak:,} of {whole.peak:,} bytes for {plan.extra:.1%} more time")
    print(plan.schedule)

    # What is recomputed, by operator.
    runs = Counter(part.op for part in plan.schedule.steps if isinstance(part, lowtide.Run))
    again = Counter(plan.graph.op[name].target for name, count in runs.items() if count > 1)
    print("recomputed:", dict(again))

    # The plan in words.
    print(f"\n{plan}\n")

    # What other caps would cost.
    for point in lowtide.frontier(plan.graph, points=4):
        print(f"  {point.peak / whole.peak:4.0%} of the peak: {point.extra:+.1%} time")

    # Keep it, and look at it in a browser.
    with tempfile.TemporaryDirectory() as folder:
        plan.save(Path(folder) / "plan.json")
        page = plan.report(Path(folder) / "plan.html")
        print(f"\n{page.name}: {page.stat().st_size // 1024} KiB")
        assert lowtide.Plan.load(Path(folder) / "plan.json") == plan


if __name__ == "__main__":
    main()
