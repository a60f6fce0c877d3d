"""Does a step capped at B run on a device that has B for it? A loop in a process that is limited to B.

    PYTHONPATH=src python benchmarks/hard_limit.py --device cuda --out benchmarks/results/hard_limit.jsonl
    PYTHONPATH=src python benchmarks/hard_limit.py           # by replay, for an H200 that is absent

A row is a step with fused AdamW in its loop, an executor, a setting of the allocator and a budget: a share of
the bytes that the uncapped step allocates, or the smallest peak that is found. On a GPU ten steps run, each
with a batch of its own, the first two with half of one, and the process may reserve the budget and not a
byte more (`torch.cuda.set_per_process_memory_fraction`). `outcome` is "ok", "out of memory", "refused"
or "failed";
`reserved` and `allocated` are what the steps took at most, beside what the plan in force foretold. All
budgets of a model run in one process after each other, and with `--jobs` several models at once, which
changes no byte (their seconds then say nothing). Rows are written as they are made, and those that the file
has of this commit, torch and device are left out, so that a run that was stopped goes on. A row that is not
as promised leaves what the allocator did in `--traces`.

By replay the same loop runs on paper (`paper_device.py`); `before` is what would be reserved if the budget
bounded allocated bytes alone and nothing were done about the rest, `alone` what a plan allocates that finds
an empty device. With `--device cpu --tiny` the same loops run without a limit, to see that all of it works.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from queue import SimpleQueue

import torch

import lowtide
from commit import commit
from hard_limit_trial import SMALLER, STEPS, SUBJECTS, Trial, outcomes
from lowtide.devices.memory import memory_by_name
from lowtide.planner.arenas import reserving
from lowtide.planner.under_budget import plan_graph
from lowtide.plans.graph import Graph
from paper_device import PaperLoop
from row_files import Row, append, there

BUDGETS = ["80%", "50%", "min"]
ABSENT = "H200"
KNOWN_BY = ("model", "executor", "setting", "asked")


def in_own_process(trial: Trial, device: str) -> Iterator[Row]:
    """The rows of a trial as they come, from a process that starts with its setting."""
    command = [sys.executable, __file__, "--device", device, "--trial", json.dumps(asdict(trial))]
    environment = {**os.environ, "PYTORCH_ALLOC_CONF": trial.setting}
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process:
            assert process.stdout is not None
            yield from (json.loads(line) for line in process.stdout if line.startswith("{"))
        if process.returncode:
            errors.seek(0)
            text = errors.read()
            sys.stderr.write(text[-3000:])
            last = (text.splitlines() or ["no output"])[-1]
            status = f"exit status {process.returncode}: {last}"
            known = {"model": trial.model, "executor": trial.executor, "setting": trial.setting}
            yield {**known, "outcome": "failed", "error": status}


def side_by_side(trials: Sequence[Trial], device: str, jobs: int) -> Iterator[Row]:
    """The rows of several trials at once, each as it comes."""
    found: SimpleQueue[Row | None] = SimpleQueue()

    def follow(trial: Trial) -> None:
        try:
            for row in in_own_process(trial, device):
                found.put(row)
        finally:
            found.put(None)

    with ThreadPoolExecutor(jobs) as pool:
        followed = [pool.submit(follow, trial) for trial in trials]
        for _ in followed:
            yield from iter(found.get, None)
    for each in followed:
        each.result()


def foretold(name: str, budgets: tuple[str, ...], *, tiny: bool = False) -> Iterator[Row]:
    """The same loop on paper, for a device that is absent, with the state that AdamW will make."""
    smaller, whole = (graph_of(name, part, tiny=tiny) for part in (2, 1))
    device = memory_by_name(ABSENT)
    for asked in budgets:
        row: Row = {"model": name, "asked": asked, "executor": "eager", "setting": ""}
        try:
            before = plan_graph(whole, asked, device=replace(device, replays=False))
            row |= {"before": reserving(before, device).reserved, "before_extra": round(before.extra, 5)}
            alone = plan_graph(whole, asked, device=device)
            size = alone.peak if alone.budget is None else alone.budget
            loop = PaperLoop(((smaller, SMALLER), (whole, STEPS - SMALLER)), size)
            (_, early), (plan, late) = loop.run()
        except lowtide.BudgetTooSmall as error:
            yield {**row, "budget": error.budget, "outcome": "refused", "smallest": error.smallest}
            continue
        row |= {"budget": size, "outcome": "ok" if max(early, late) <= size else "over"}
        row |= {"plan_allocated": plan.allocated, "plan_reserved": plan.reserved, "arena": plan.arena}
        yield {**row, "reserved": max(early, late), "extra": round(plan.extra, 5), "alone": alone.allocated}


def graph_of(name: str, part: int, *, tiny: bool) -> Graph:
    """The graph of a step with a part of the batch."""
    model, batch = SUBJECTS[name].build("meta", tiny=tiny)
    batch = tuple(each[: max(len(each) // part, 1)] for each in batch)
    optimizer = torch.optim.AdamW(model.parameters())
    try:
        return lowtide.plan(model, *batch, device=ABSENT, optimizer=optimizer).graph
    finally:
        torch._dynamo.reset()


def wanted(args: argparse.Namespace, facts: Row) -> Iterator[Trial]:
    """The trials with the budgets that the file lacks."""
    done = there(args.out, KNOWN_BY, facts)
    for name, executor, setting in product(args.only, args.executors, args.settings):
        budgets = tuple(each for each in args.budgets if (name, executor, setting, each) not in done)
        if budgets:
            yield Trial(name, budgets, executor, setting, args.tiny, args.traces)


def rows(args: argparse.Namespace, facts: Row) -> Iterator[Row]:
    trials = list(wanted(args, facts))
    if args.device == ABSENT:
        for trial in trials:
            yield from foretold(trial.model, trial.budgets, tiny=args.tiny)
        return
    for row in side_by_side(trials, args.device, args.jobs):
        yield {**row, "jobs": args.jobs}


def facts_of(device: str) -> Row:
    """What all rows of a run have in common."""
    kind = f"{ABSENT}, absent" if device == ABSENT else device
    if device == "cuda":
        kind = torch.cuda.get_device_name()
    return {"device": kind, "torch": torch.__version__, "commit": commit()}


def line(row: Row) -> str:
    """A row for people, in MiB."""
    sizes = (
        "budget",
        "plan_allocated",
        "allocated",
        "plan_reserved",
        "reserved",
        "before",
        "arena",
        "smallest",
    )
    told = " ".join(f"{name} {row[name] >> 20}" for name in sizes if row.get(name) is not None)
    time = f" {row['seconds'] * 1e3:.1f} ms" if row.get("seconds") else ""
    extra = f" {row['extra']:+.1%}" if "extra" in row else ""
    setting = row.get("setting") or "default"
    return (
        f"{row['model']:12} {row['executor']:8} {setting:12.12} {row.get('asked', ''):5} "
        f"{row['outcome']:8} {told}{extra}{time} {row.get('error', '')[:150]}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=(ABSENT, "cuda", "cpu"), default=ABSENT)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=list(SUBJECTS))
    parser.add_argument("--budgets", nargs="+", metavar="BUDGET", default=BUDGETS)
    parser.add_argument("--executors", nargs="+", choices=("eager", "inductor"), default=["eager"])
    parser.add_argument("--settings", nargs="+", metavar="SETTING", default=[""])
    parser.add_argument("--jobs", type=int, default=1, help="models that run at once")
    parser.add_argument(
        "--traces", default="", help="a folder for what the allocator did where that surprises"
    )
    parser.add_argument("--tiny", action="store_true", help="steps of a second, to see that all of it works")
    parser.add_argument("--out", type=Path, help="the file of results, added to")
    parser.add_argument("--trial", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only is None:  # torchvision may be missing where nothing runs
        args.only = [
            name for name in SUBJECTS if args.device == "cuda" or name not in ("swin_t", "convnext_t")
        ]
    if args.trial is not None:
        for row in outcomes(Trial(**{**args.trial, "budgets": tuple(args.trial["budgets"])}), args.device):
            print(json.dumps(row), flush=True)
        return
    facts = facts_of(args.device)
    for row in rows(args, facts):
        print(line(row), flush=True)
        append({**row, **facts}, args.out)


if __name__ == "__main__":
    main()
