"""Predicted against measured: peak memory, step time and gradients, capped and uncapped, on a GPU.

    PYTHONPATH=src python benchmarks/exactness.py --out benchmarks/results/exactness-h200.jsonl

Each network runs in a process of its own: plain PyTorch first (twice, to see whether its own gradients
repeat), then with torch.utils.checkpoint around every block, then Lowtide above the natural peak, at
shares of the uncapped peak, and at the smallest budget. A network that the results file has is skipped.
Peaks are `max_memory_allocated`; step times are the median of the timed steps of a forward and a backward.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

import lowtide
from commit import commit
from networks import NETWORKS, Bottleneck, DenseBlock, GPTBlock

SHARES = ("80%", "60%", "45%", "min")
BLOCKS = (GPTBlock, Bottleneck, DenseBlock)


def run_step(model: Any, batch: Any) -> torch.Tensor:
    loss = model(*batch)
    loss.backward()
    return loss.detach()


def clear(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


class Checkpointed:
    """A model whose blocks are recomputed by torch.utils.checkpoint, while the context lasts."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.blocks = [module for module in model.modules() if isinstance(module, BLOCKS)]

    def __enter__(self) -> Checkpointed:
        for block in self.blocks:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        return self

    def __exit__(self, *_: object) -> None:
        for block in self.blocks:
            del block.forward


Outcome = tuple[list[torch.Tensor], list[torch.Tensor]]


def outcome(model: torch.nn.Module, batch: Any, state: dict[str, torch.Tensor]) -> Outcome:
    """Loss and gradients, and buffers, of one step from a fixed state, on the host."""
    model.load_state_dict(state)
    clear(model)
    torch.manual_seed(1)
    loss = run_step(model, batch)
    gradients = [loss, *(p.grad for p in model.parameters())]
    return [tensor.cpu() for tensor in gradients], [buffer.cpu() for buffer in model.buffers()]


def compare(left: Outcome, right: Outcome) -> dict[str, str]:
    words = []
    for one, other in zip(left, right, strict=True):
        equal = all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
        words.append("identical" if equal else "differ")
    return dict(zip(("gradients", "buffers"), words, strict=True))


def clock(model: torch.nn.Module, batch: Any, steps: int) -> dict[str, float]:
    times = []
    for index in range(steps + 3):
        clear(model)
        torch.cuda.synchronize()
        if index == 2:
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        run_step(model, batch)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return {
        "measured_peak": torch.cuda.max_memory_allocated(),
        "seconds": statistics.median(times[3:]),
        "seconds_spread": max(times[3:]) - min(times[3:]),
    }


def bench(name: str, steps: int, shares: tuple[str, ...]) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    model, batch = NETWORKS[name]("cuda")
    state = {key: value.cpu() for key, value in model.state_dict().items()}
    facts = {
        "network": name,
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "lowtide": lowtide.__version__,
        "commit": commit(),
        "command": f"PYTHONPATH=src python {' '.join(sys.argv[:-3])} --networks {name}",
    }
    plain = outcome(model, batch, state)
    repeats = compare(plain, outcome(model, batch, state))
    eager = clock(model, batch, steps)
    rows: list[dict[str, Any]] = [{**facts, "tool": "eager", **repeats, **eager}]
    say(rows[-1], eager["seconds"])
    with Checkpointed(model) as wrapped:
        if wrapped.blocks:
            found = compare(plain, outcome(model, batch, state))
            rows.append({**facts, "tool": "checkpoint", **found, **clock(model, batch, steps)})
            say(rows[-1], eager["seconds"])
    natural = None
    for share in ("above", *shares):
        budget: Any = share
        if share == "above":
            budget = torch.cuda.get_device_properties(0).total_memory
        elif share != "min":
            budget = int(natural * float(share.rstrip("%")) / 100)
        row: dict[str, Any] = {**facts, "tool": "lowtide", "share": share}
        clear(model)
        start = time.perf_counter()
        try:
            lowtide.cap(model, budget)
            capped = outcome(model, batch, state)
            plan = lowtide.plan_of(model)
            row |= {"budget": plan.budget, "predicted_peak": plan.allocated, "predicted_extra": plan.extra}
            row |= {"setup_seconds": time.perf_counter() - start, "ops": len(plan.graph.ops)}
            row |= {"prices": plan.graph.prices, "method": plan.method}
            row |= compare(plain, capped)
            row |= clock(model, batch, steps)
            natural = natural or plan.allocated
        except lowtide.BudgetTooSmall as error:
            row |= {"budget": error.budget, "smallest": error.smallest, "error": "budget too small"}
        lowtide.uncap(model)
        rows.append(row)
        say(row, eager["seconds"])
    return rows


def say(row: dict[str, Any], base: float) -> None:
    predicted = row.get("predicted_peak")
    peak = row.get("measured_peak", 0)
    gap = "" if predicted is None else f"{(peak - predicted) / predicted:+8.3%}"
    print(
        f"{row['network']:12} {row['tool']:10} {row.get('share', ''):6} "
        f"predicted {(predicted or 0) / 2**20:9.1f} measured {peak / 2**20:9.1f} MiB {gap:9} "
        f"{row.get('seconds', 0) * 1e3:7.1f} ms ({row.get('seconds', 0) / base - 1:+6.1%}, planned "
        f"{row.get('predicted_extra', 0):+6.1%}) {row.get('gradients', row.get('error'))} "
        f"{row.get('buffers', '')} "
        f"setup {row.get('setup_seconds', 0):.0f} s",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--shares", default=",".join(SHARES))
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device")
    names = args.networks.split(",")
    if args.child:
        rows = bench(names[0], args.steps, tuple(args.shares.split(",")))
        if args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            with args.out.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
        return
    done = set()
    if args.out and args.out.exists():
        done = {json.loads(line)["network"] for line in args.out.read_text().splitlines()}
    for name in names:
        if name in done:
            continue
        command = [sys.executable, __file__, *sys.argv[1:], "--child", "--networks", name]
        subprocess.run(command, check=False)


if __name__ == "__main__":
    main()
