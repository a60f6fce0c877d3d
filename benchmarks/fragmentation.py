"""What fragmentation costs a capped step, and what would avoid it: replays of the allocator, without a GPU.

    PYTHONPATH=src python benchmarks/fragmentation.py       # prints, and writes results/fragmentation.jsonl
    PYTHONPATH=src python benchmarks/fragmentation.py --only gpt resnet50

The steps of the head-to-head, planned for an H200 that is absent, from an allocator that holds nothing. A row
has the bytes that are allocated at most, and what is reserved for them:

- `default`, `expandable`: by torch's allocator as it is, and with expandable_segments:True;
- `arena`: parameters and inputs apart, all large requests of the step in one segment of the least size in
  which best fit with splits, torch's own, serves two steps (a private pool may be it), others in theirs;
- `offline`: the step's requests at offsets chosen from all lifetimes (`placement.py`), which torch has no way
  to enforce;
- `live`: the bytes that are alive at once, below which nothing is;
- `within`: what the planner has to aim at, as a share of the budget in percent, for the first three to be
  within the budget, and the extra time of that plan;
- `least` (of the smallest budget): the least that plans between it and twice that reserve.

The plans of an absent device have no workspaces of convolutions: what is measured on one is above these
figures. `measured` is what the head-to-head measured for the step that keeps everything, where the schedule
is the same.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import lowtide
from commit import commit
from headtohead_models import SUBJECTS
from lowtide.devices.allocator_settings import AllocatorSettings
from lowtide.devices.blocks import Block
from lowtide.devices.caching_allocator import CachingAllocator, NoRoomError, Segment
from lowtide.devices.memory import memory_by_name
from lowtide.devices.reserved import Loop, StepRequests
from lowtide.planner.under_budget import plan_graph
from lowtide.plans.events import events
from lowtide.plans.planned_step import Plan
from placement import Stay, best_arena, live_peak

MIB = 2**20
RESULTS = Path(__file__).parent / "results"
BUDGETS = (None, "80%", "60%", "40%", "min")
DEEPEST = 50
"""Percent of a budget below which nothing is tried."""
DEVICE = "H200"


@dataclass
class Recorder:
    """Stands for an allocator, and notes when each request comes and goes."""

    clock: int = 0
    open: dict[int, Stay] = field(default_factory=dict)
    stays: list[Stay] = field(default_factory=list)

    def allocate(self, size: int) -> int:
        self.clock += 1
        self.open[self.clock] = Stay(-(-size // 512) * 512, self.clock, 0)
        return self.clock

    def release(self, key: int) -> None:
        self.clock += 1
        begun = self.open.pop(key)
        self.stays.append(Stay(begun.size, begun.start, self.clock))


def recorded(plan: Plan) -> list[Stay]:
    """The requests of a step; what it gives its caller is there to the end."""
    recorder = Recorder()
    step = StepRequests(plan.graph, recorder)
    for event in events(plan.graph, plan.schedule):
        step.enter(event)
    step.clear()
    return recorder.stays


class Apart:
    """One segment for large requests, and pools of their own for small ones."""

    def __init__(self, size: int) -> None:
        self.arena = CachingAllocator([Segment(0, ((size, True),))], limit=size)
        self.others = CachingAllocator()

    def allocate(self, size: int) -> tuple[CachingAllocator, Block]:
        owner = self.arena if size > MIB else self.others
        return owner, owner.allocate(size)

    def release(self, held: tuple[CachingAllocator, Block]) -> None:
        held[0].release(held[1])


def in_arena(plan: Plan, size: int) -> int | None:
    """What an arena of that size and the small pool take; None where it is too small for two steps."""
    apart = Apart(size)
    step = StepRequests(plan.graph, apart)
    try:
        for _ in range(2):
            step.clear()
            for event in events(plan.graph, plan.schedule):
                step.enter(event)
    except NoRoomError:
        return None
    return size + apart.others.reserved_peak


def least_arena(plan: Plan, live: int) -> int:
    """The least arena between what is alive and what serves, by halves: best fit knows no order of sizes."""
    low, high = live // (2 * MIB) * 2 * MIB, (live // MIB + 2) * MIB
    while (found := in_arena(plan, high)) is None:
        low, high = high, high + max(high // 50, 2 * MIB)
    while high - low > 2 * MIB:
        middle = (low + high) // 2
        smaller = in_arena(plan, middle)
        low, high, found = (middle, high, found) if smaller is None else (low, middle, smaller)
    return found


def beside(plan: Plan) -> int:
    """What is there besides the step's own requests."""
    graph = plan.graph
    return graph.given_bytes + graph.fixed_bytes - graph.fixed.get("allocator", 0)


def by_arena(plan: Plan) -> int:
    return beside(plan) + least_arena(plan, live_peak(recorded(plan)))


WAYS: dict[str, Callable[[Plan], int]] = {
    "default": lambda plan: Loop(plan.graph, events(plan.graph, plan.schedule)).peaks().reserved,
    "expandable": lambda plan: (
        Loop(plan.graph, events(plan.graph, plan.schedule), settings=AllocatorSettings(expandable=True))
        .peaks()
        .reserved
    ),
    "arena": by_arena,
}
"""What is reserved for a plan, by the way that its requests are served."""


def row(name: str, budget: str | None, plan: Plan) -> dict[str, Any]:
    """The figures of a plan, in bytes of the whole step."""
    stays = recorded(plan)
    offline = best_arena(stays)
    return {
        "model": name,
        "budget": budget or "none",
        "requests": len(stays),
        "peak": plan.peak,
        "live": beside(plan) + live_peak(stays),
        "allocated": Loop(plan.graph, events(plan.graph, plan.schedule)).peaks().allocated,
        **{way: reserved(plan) for way, reserved in WAYS.items()},
        "offline": beside(plan) + offline.size,
        "order": offline.order,
        "extra": round(plan.extra, 5),
    }


def aims(graph: lowtide.Graph, sizes: Iterable[int]) -> Iterator[Plan]:
    """Plans for these budgets, as long as there are any; the same one comes once."""
    last = None
    for size in sizes:
        try:
            plan = plan_graph(graph, size, device=memory_by_name(DEVICE))
        except lowtide.BudgetTooSmall:
            return
        if last is None or plan.schedule != last.schedule:
            yield plan
        last = plan


def within(plan: Plan) -> dict[str, list[float] | None]:
    """By way: the aim in percent of the budget, and its extra time; None where nothing was found."""
    budget = plan.budget or plan.peak
    found: dict[str, list[float] | None] = dict.fromkeys(WAYS)
    for lower in aims(plan.graph, (budget * percent // 100 for percent in range(100, DEEPEST, -1))):
        for way, pair in found.items():
            if pair is None and WAYS[way](lower) <= budget:
                found[way] = [round(100 * (lower.budget or 0) / budget), round(lower.extra, 5)]
        if None not in found.values():
            break
    return found


def least(plan: Plan) -> dict[str, int]:
    """By way: the least that any plan from the smallest peak to twice that reserves."""
    plans = list(aims(plan.graph, (plan.peak * n // 20 for n in range(40, 19, -1))))
    return {way: min(map(reserved, plans)) for way, reserved in WAYS.items()}


def measured() -> dict[str, dict[str, int]]:
    """What was measured of steps that keep everything."""
    lines = map(json.loads, (RESULTS / "headtohead-h200.jsonl").open())
    kept = [each for each in lines if each["tool"] == "lowtide-eager" and each["setting"] == "uncapped"]
    return {each["model"]: each for each in kept}


def rows(name: str) -> Iterator[dict[str, Any]]:
    model, batch = SUBJECTS[name].build("meta")
    whole = lowtide.plan(model, *batch, device=DEVICE)
    torch._dynamo.reset()
    seen = measured().get(name)
    other = 0 if seen is None else max(seen["baseline"] - whole.graph.given_bytes, 0)
    graph = whole.graph.replace(fixed={"other": other} if other else {})
    for budget in BUDGETS:
        try:
            plan = plan_graph(graph, budget, device=memory_by_name(DEVICE))
        except lowtide.BudgetTooSmall:
            continue
        found = row(name, budget, plan)
        if budget is None and seen is not None:
            found["measured"] = {"allocated": seen["peak"], "reserved": seen["reserved"]}
        if budget == "min":
            found["least"] = least(plan)
        elif budget is not None:
            found["within"] = within(plan)
        yield {**found, "torch": torch.__version__, "commit": commit()}


HEAD = f"{'step':14} {'budget':7} {'allocated':>9} {'live':>7} {'default':>8} {'expand.':>8} {'arena':>7} "
HEAD += f"{'offline':>8} {'measured':>9}  aim and extra time to be within: default, expandable, arena"


def line(found: dict[str, Any]) -> str:
    """A row of the table: MiB, and shares that are reserved above what is allocated."""
    of = found["allocated"]
    text = f"{found['model']:14} {found['budget']:7} {of / MIB:9.0f} {found['live'] / of - 1:7.1%}"
    for key, width in (("default", 8), ("expandable", 8), ("arena", 7), ("offline", 8)):
        text += f" {found[key] / of - 1:{width}.1%}"
    seen = found.get("measured")
    text += f" {seen['reserved'] / seen['allocated'] - 1:9.1%}  " if seen else f" {'':9}  "
    if "least" in found:
        return text + "least: " + ", ".join(f"{found['least'][way] / MIB:.0f} MiB" for way in WAYS)
    pairs = [found["within"][way] for way in WAYS] if "within" in found else []
    return text + ", ".join("-" if not pair else f"{pair[0]:.0f}% {pair[1]:+.1%}" for pair in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=list(SUBJECTS), default=list(SUBJECTS))
    parser.add_argument(
        "--out", type=Path, default=RESULTS / "fragmentation.jsonl", help="the file of results"
    )
    args = parser.parse_args()
    lines = map(json.loads, args.out.open()) if args.out.exists() else ()
    kept = [each for each in lines if each["model"] not in args.only]
    print(HEAD)
    for name in args.only:
        for found in rows(name):
            kept.append(found)
            print(line(found), flush=True)
            args.out.write_text("".join(json.dumps(each) + "\n" for each in kept))


if __name__ == "__main__":
    main()
