"""Does a step capped at B run on a device that has B for it? A loop in a process that is limited to B.

    PYTHONPATH=src python benchmarks/hard_limit.py --device cuda --out benchmarks/results/hard_limit.jsonl
    PYTHONPATH=src python benchmarks/hard_limit.py           # by replay, for an H200 that is absent

A row is a step with fused AdamW in its loop, an executor, a setting of the allocator and a budget: a share of
the bytes that the uncapped step allocates, or the smallest peak that is found. On a GPU ten steps run, each
with a batch of its own, the first two with half of one, and the process may reserve the budget and not a
byte more (`torch.cuda.set_per_process_memory_fraction`). `outcome` is "ok", "out of memory" or "refused";
`reserved` and `allocated` are what the steps took at most, beside what the plan in force foretold. All
budgets of a model run in one process after each other, and with `--jobs` several models at once, which
changes no byte (their seconds then say nothing). A row that is not as promised leaves what the allocator did
in `--traces`.

By replay the same loop runs on paper (`paper_device.py`); `before` is what would be reserved if the budget
bounded allocated bytes alone and nothing were done about the rest, `alone` what a plan allocates that finds
an empty device. With `--device cpu --tiny` the same loops run without a limit, to see that all of it works.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import torch
from torch import nn

import headtohead_models
import lowtide
import vision
from commit import commit
from headtohead_models import Batch, Step, Subject, of_images
from lowtide.devices.memory import memory_by_name
from lowtide.planner.arenas import reserving
from lowtide.planner.under_budget import plan_graph
from lowtide.plans.graph import Graph
from paper_device import PaperLoop

STEPS = 10
SMALLER = 2
BUDGETS = ["80%", "50%", "min"]
ABSENT = "H200"
TRACED = 400_000
"""Requests of which a trace has at most the last ones."""

Row = dict[str, Any]


def of_torchvision(name: str, batch: int, **tiny: Any) -> Callable[[], Step]:
    def build() -> Step:
        import torchvision

        make = getattr(torchvision.models, name)
        return of_images(vision.Classifier(make(**tiny)), batch)

    return build


SUBJECTS = {
    **{name: headtohead_models.SUBJECTS[name] for name in ("gpt", "llama_1b", "vit_b16", "bert_base")},
    **{name: headtohead_models.SUBJECTS[name] for name in ("resnet50", "unet", "densenet161")},
    "vgg19": Subject(
        torch.float32,
        lambda: of_images(vision.vgg19(), 64),
        lambda: of_images(
            vision.Classifier(nn.Sequential(vision.conv(3, 8, 3), nn.Flatten(), nn.Linear(8192, 9))), 2, 32
        ),
    ),
    "swin_t": Subject(
        torch.bfloat16, of_torchvision("swin_t", 128), headtohead_models.SUBJECTS["vit_b16"].tiny
    ),
    "convnext_t": Subject(
        torch.bfloat16, of_torchvision("convnext_tiny", 128), headtohead_models.SUBJECTS["resnet50"].tiny
    ),
}
"""Those of the head-to-head, and three more; swin_t and convnext_t need torchvision."""


@dataclass(frozen=True)
class Trial:
    """The rows to be of a model: one for each of `budgets`, with `PYTORCH_ALLOC_CONF` as `setting`."""

    model: str
    budgets: tuple[str, ...]
    executor: str
    setting: str
    tiny: bool = False
    traces: str = ""


class Loop:
    """A model, its optimizer, and batches that come from the host for each step."""

    def __init__(self, trial: Trial, device: str) -> None:
        self.model, batch = SUBJECTS[trial.model].build(device, tiny=trial.tiny)
        self.device, self.batch = device, tuple(part.cpu() for part in batch)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def steps(self) -> Iterator[None]:
        batch: Batch
        for number in range(STEPS):
            rows = len(self.batch[0]) // (2 if number < SMALLER else 1)
            batch = tuple(part[:rows].to(self.device) for part in self.batch)
            self.optimizer.zero_grad()
            self.model(*batch).backward()
            self.optimizer.step()
            yield


def bytes_of(trial: Trial, asked: str, device: str) -> int:
    """What a budget comes to; the smallest peak of a compiled step shows only when it is compiled."""
    loop = Loop(trial, device)
    batch = tuple(part.to(device) for part in loop.batch)
    plan = lowtide.plan(loop.model, *batch, budget=asked, optimizer=loop.optimizer, executor=trial.executor)
    return plan.peak if plan.budget is None else plan.budget


def happened(trial: Trial, size: int, device: str) -> Row:
    """Ten steps in this process, which is limited where the device is a GPU; a refusal is followed once."""
    clear(device)
    if device == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min((size + 1) / total, 1.0))
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.memory._record_memory_history(context=None, max_entries=TRACED)
    loop = Loop(trial, device)
    row: Row = {"budget": size}
    try:
        lowtide.cap(loop.model, size, optimizer=loop.optimizer, executor=trial.executor)
        seconds = timed(loop.steps(), device)
    except torch.OutOfMemoryError as error:
        row |= {"outcome": "out of memory", "error": str(error).partition(". GPU")[0]}
    except lowtide.BudgetTooSmall as error:
        row |= {"outcome": "refused", "smallest": error.smallest}
    else:
        row |= {"outcome": "ok", "seconds": seconds}
    plan = lowtide.plan_of(loop.model)
    if plan is not None:
        row |= {"plan_allocated": plan.allocated, "plan_reserved": plan.reserved, "arena": plan.arena}
        row |= {"extra": round(plan.extra, 5), "ops": len(plan.graph.ops)}
    if device == "cuda":
        row |= {
            "allocated": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.max_memory_reserved(),
        }
        if trial.traces and not as_promised(row):
            keep_trace(trial, plan, row)
    return row


def as_promised(row: Row) -> bool:
    """Whether all steps ran within the budget, and took what was foretold."""
    if row["outcome"] != "ok" or row["plan_reserved"] is None:
        return False
    return bool(row["reserved"] <= row["plan_reserved"] and row["allocated"] == row["plan_allocated"])


def keep_trace(trial: Trial, plan: lowtide.Plan | None, row: Row) -> None:
    """Each request of the loop, and the plan."""
    history = torch.cuda.memory._snapshot()["device_traces"][0]
    data = {
        "row": row,
        "plan": None if plan is None else json.loads(plan.to_json()),
        "trace": [[each["action"], each.get("addr"), each["size"]] for each in history],
    }
    name = f"{trial.model}-{trial.executor}-{row['budget']}.json.gz"
    with gzip.open(Path(trial.traces) / name, "wt") as file:
        json.dump(data, file)


def timed(steps: Iterator[None], device: str) -> float | None:
    """The median of the last steps."""
    if device != "cuda":
        for _ in steps:
            pass
        return None
    marks = []
    for _ in steps:
        marks.append(torch.cuda.Event(enable_timing=True))
        marks[-1].record()
    torch.cuda.synchronize()
    return statistics.median(one.elapsed_time(other) / 1e3 for one, other in pairwise(marks[-6:]))


def clear(device: str) -> None:
    """Let the next loop find the device as the first one did."""
    torch._dynamo.reset()
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(1.0)


def outcomes(trial: Trial, device: str) -> Iterator[Row]:
    """What happens under each budget; where it is refused, under the one that is named, too."""
    for asked in trial.budgets:
        clear(device)
        head = {"model": trial.model, "asked": asked, "executor": trial.executor, "setting": trial.setting}
        try:
            size = bytes_of(trial, asked, device)
        except lowtide.BudgetTooSmall as error:
            yield {**head, "budget": error.budget, "outcome": "refused", "smallest": error.smallest}
            continue
        row = happened(trial, size, device)
        yield {**head, **row}
        if asked == "min" and row["outcome"] == "refused":
            yield {**head, "asked": "the least named", **happened(trial, row["smallest"], device)}


def in_own_process(trial: Trial, device: str) -> list[Row]:
    """The rows of a trial, from a process that starts with its setting."""
    command = [sys.executable, __file__, "--device", device, "--trial", json.dumps(asdict(trial))]
    environment = {**os.environ, "PYTORCH_ALLOC_CONF": trial.setting}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    found = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    if ran.returncode:
        last = (ran.stderr.splitlines() or ["no output"])[-1]
        found.append({"model": trial.model, "executor": trial.executor, "outcome": "failed", "error": last})
        sys.stderr.write(ran.stderr[-3000:])
    return found


def foretold(name: str, budgets: tuple[str, ...], *, tiny: bool = False) -> Iterator[Row]:
    """The same loop on paper, for a device that is absent, with the state that AdamW will make."""
    smaller, whole = (graph_of(name, part, tiny=tiny) for part in (2, 1))
    device = memory_by_name(ABSENT)
    for asked in budgets:
        row: Row = {
            "model": name,
            "asked": asked,
            "executor": "eager",
            "setting": "",
            "device": f"{ABSENT}, absent",
        }
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


def rows(args: argparse.Namespace) -> Iterator[Row]:
    budgets = tuple(args.budgets)
    if args.device == ABSENT:
        for name in args.only:
            yield from foretold(name, budgets, tiny=args.tiny)
        return
    kind = torch.cuda.get_device_name() if args.device == "cuda" else args.device
    trials = [
        Trial(name, budgets, executor, setting, args.tiny, args.traces)
        for name, executor, setting in product(args.only, args.executors, args.settings)
    ]
    with ThreadPoolExecutor(args.jobs) as pool:
        for found in pool.map(partial(in_own_process, device=args.device), trials):
            yield from ({**row, "device": kind, "jobs": args.jobs} for row in found)


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
    for row in rows(args):
        print(line(row), flush=True)
        if args.out is not None:
            with args.out.open("a") as file:
                file.write(json.dumps({**row, "torch": torch.__version__, "commit": commit()}) + "\n")


if __name__ == "__main__":
    main()
