"""Does a step capped at B run on a device that has B left for it? What the replay says, and what happens.

    PYTHONPATH=src python benchmarks/hard_limit.py                  # by replay, for an H200 that is absent
    PYTHONPATH=src python benchmarks/hard_limit.py --device cuda --only gpt --budgets 80% --factors 1 1.05

A row is a step of the head-to-head with AdamW in its loop, a budget, a setting of the allocator, and a
factor: what the process may reserve (`torch.cuda.set_per_process_memory_fraction`), as a share of the
budget. `foretold` is whether the replay of the loop stays within that. With `--device cuda` ten steps
run, each row in a process of its own, since neither the setting nor what was reserved before can be
undone: `outcome` is "ok" or "out of memory", beside what was allocated and reserved, and what the plan
that ran foretold of that (`plan_reserved`). With `--device cpu --tiny` the same steps run without a
limit, to see that all of it works.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

import lowtide
from commit import commit
from headtohead_models import SUBJECTS
from lowtide.devices.allocator_settings import read_settings
from lowtide.devices.caching_allocator import NoRoomError
from lowtide.devices.reserved import loop_peaks
from lowtide.plans.planned_step import Plan

RESULTS = Path(__file__).parent / "results"
SETTINGS = ("", "expandable_segments:True")
FACTORS = (1.0, 1.03, 1.05, 1.1, 1.25)
STEPS = 10


@dataclass(frozen=True)
class Trial:
    """A row to be: `budget` in bytes, the limit as a factor of it, and `PYTORCH_ALLOC_CONF`."""

    model: str
    budget: int
    factor: float
    setting: str
    tiny: bool = False

    @property
    def limit(self) -> int:
        return int(self.factor * self.budget)


def planned(name: str, budget: str, *, tiny: bool = False, device: str = "H200") -> Plan:
    """The plan for a device that is absent, with the state that AdamW will make."""
    model, batch = SUBJECTS[name].build("meta", tiny=tiny)
    optimizer = torch.optim.AdamW(model.parameters())
    try:
        return lowtide.plan(model, *batch, device=device, budget=budget, optimizer=optimizer)
    finally:
        torch._dynamo.reset()


def foretold(plan: Plan, trial: Trial) -> dict[str, Any]:
    """Whether the loop stays within the limit by replay, and what it reserves without one."""
    settings = read_settings(trial.setting)
    free = loop_peaks(plan.graph, plan.schedule, settings=settings)
    try:
        loop_peaks(plan.graph, plan.schedule, settings=settings, limit=trial.limit)
    except NoRoomError:
        return {"foretold": "out of memory", "foretold_reserved": free.reserved, "peak": plan.peak}
    return {"foretold": "ok", "foretold_reserved": free.reserved, "peak": plan.peak}


def happened(trial: Trial, device: str) -> dict[str, Any]:
    """Ten steps in this process, which is limited where the device is a GPU."""
    on_gpu = device == "cuda"
    if on_gpu:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(trial.limit / total, 1.0))
    try:
        plan = train(trial, device)
    except torch.OutOfMemoryError as error:
        return {"outcome": "out of memory", "error": str(error).splitlines()[0]}
    except lowtide.BudgetTooSmall as error:
        return {"outcome": "refused", "smallest": error.smallest}
    found = {"outcome": "ok", "peak": plan.peak, "plan_reserved": plan.reserved}
    if on_gpu:
        found["allocated"] = torch.cuda.max_memory_allocated()
        found["reserved"] = torch.cuda.max_memory_reserved()
    return found


def train(trial: Trial, device: str) -> Plan:
    model, batch = SUBJECTS[trial.model].build(device, tiny=trial.tiny)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    lowtide.cap(model, trial.budget, optimizer=optimizer)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(*batch).backward()
        optimizer.step()
    plan = lowtide.plan_of(model)
    assert plan is not None
    return plan


def in_own_process(trial: Trial, device: str) -> dict[str, Any]:
    """What `happened` in a process that starts with the setting."""
    command = [sys.executable, __file__, "--device", device, "--trial", json.dumps(asdict(trial))]
    environment = {**os.environ, "PYTORCH_ALLOC_CONF": trial.setting}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = ran.stdout.splitlines()
    if ran.returncode or not lines:
        return {"outcome": "failed", "error": (ran.stderr.splitlines() or ["no output"])[-1]}
    return dict(json.loads(lines[-1]))


def rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for name in args.only:
        for budget in args.budgets:
            try:
                plan = planned(name, budget, tiny=args.tiny)
            except lowtide.BudgetTooSmall as error:
                print(f"{name:14} {budget:5} refused: {error.smallest >> 20} MiB are the least")
                continue
            size = plan.peak if plan.budget is None else plan.budget
            for setting, factor in product(SETTINGS, args.factors):
                trial = Trial(name, size, factor, setting, args.tiny)
                row = {**asdict(trial), "asked": budget, "limit": trial.limit, **foretold(plan, trial)}
                if args.device != "H200":
                    row.update(in_own_process(trial, args.device))
                yield {**row, "device": args.device, "torch": torch.__version__, "commit": commit()}


def line(row: dict[str, Any]) -> str:
    seen = f"  {row['outcome']}" if "outcome" in row else ""
    if "reserved" in row:
        seen += f", reserved {row['reserved'] >> 20} MiB, foretold {row['plan_reserved'] >> 20}"
    return (
        f"{row['model']:14} {row['asked']:5} {row['budget'] >> 20:7} MiB x {row['factor']:<5} "
        f"{row['setting'] or 'default':26} foretold: {row['foretold']}{seen}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("H200", "cuda", "cpu"), default="H200")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=list(SUBJECTS), default=list(SUBJECTS))
    parser.add_argument("--budgets", nargs="+", metavar="BUDGET", default=["80%", "50%", "min"])
    parser.add_argument("--factors", nargs="+", type=float, metavar="FACTOR", default=list(FACTORS))
    parser.add_argument("--tiny", action="store_true", help="steps of a second, to see that all of it works")
    parser.add_argument("--out", type=Path, help="the file of results, added to")
    parser.add_argument("--trial", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.trial is not None:
        print(json.dumps(happened(Trial(**args.trial), args.device)))
        return
    for row in rows(args):
        print(line(row), flush=True)
        if args.out is not None:
            with args.out.open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
