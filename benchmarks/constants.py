"""What the planner's constants matter: each of them halved and doubled, and what becomes of the plans.

    PYTHONPATH=src python benchmarks/constants.py                 # a table; rows in results/constants.jsonl
    PYTHONPATH=src python benchmarks/constants.py --only search --large --match LONG,CALL

A row says, over some graphs and budgets, how much more time the plans take with the other value (the median
and both extremes, as shares of the step's predicted time), and how much larger the smallest peak is. The
search is deterministic, so what differs comes from the constant. Those of the search are
tried on synthetic steps of 40 to 50 ops (with --large of 120 to 130); those of fusion on steps of the zoo as
they are planned for Inductor on the CPU, by their roofline prices and quick plans. Budgets lie between the
smallest and the uncapped peak of the plans with the usual values.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import lowtide
from commit import commit
from lowtide.capture import op_classes
from lowtide.fusion import fused_graph, traffic, work
from lowtide.solve.quick import quick, smallest
from lowtide.solve.search import build, ruin, search, seeds
from lowtide.solve.search.effort import Effort
from synthetic import random_step, scaled

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from zoo import ZOO

RESULTS = Path(__file__).parent / "results" / "constants.jsonl"
SHARES = (0.75, 0.5, 0.25, 0.1)
CASES = (
    "gpt_dropout",
    "llama",
    "densenet",
    "resnet",
    "unet_bilinear",
    "vit",
    "moe_dense",
    "hf_bert",
    "hf_t5",
    "inception",
)

Found = dict[str, tuple[int, list[float | None]]]
"""By graph: the smallest peak, and the seconds under each budget (None where nothing fits)."""


@contextmanager
def patched(module: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


@contextmanager
def defined(name: str, value: str) -> Iterator[None]:
    """The compiled search with another value of one of its constants."""
    with tempfile.TemporaryDirectory() as folder:
        for path in build.SOURCES.iterdir():
            text = path.read_text()
            Path(folder, path.name).write_text(
                re.sub(rf"(?m)^#define {name} \S+", f"#define {name} {value}", text)
            )
        with patched(build, "SOURCES", Path(folder)):
            build.library.cache_clear()
            yield
    build.library.cache_clear()


@contextmanager
def effort(factor: float) -> Iterator[None]:
    before = search.effort_for

    def other(ops: int, native: bool) -> Effort:
        found = before(ops, native)
        return replace(found, edits=int(found.edits * factor))

    with patched(search, "effort_for", other):
        yield


BUDGETS: dict[str, list[int]] = {}
LARGE: list[bool] = []


def budgets(name: str, least: int, top: int) -> list[int]:
    """The budgets for a graph, by its first plans."""
    return BUDGETS.setdefault(name, [int(least + (top - least) * share) for share in SHARES])


def searched() -> Found:
    """The ladders of the synthetic steps."""
    graphs = {f"random {seed}": random_step(seed, 16) for seed in range(3)}
    graphs |= {"transformer": scaled(40)}
    if LARGE:
        graphs = {"alike": scaled(110), "unlike": scaled(110, alike=False), "random": random_step(9, 45)}
    found: Found = {}
    for name, graph in graphs.items():
        ladder = search.Search(graph).run()
        best = [ladder.best(budget) for budget in budgets(name, ladder[0].peak, ladder[len(ladder) - 1].peak)]
        found[name] = ladder[0].peak, [rung.seconds if rung else None for rung in best]
    return found


def compiled() -> Found:
    """Quick plans of compiled steps."""
    found: Found = {}
    for name in CASES:
        model, args, kwargs = ZOO[name].make()
        plan = lowtide.plan(model, *args, kwargs=kwargs, executor="inductor")
        torch._dynamo.reset()
        least = smallest(plan.graph).peak
        plans = [quick(plan.graph, budget) for budget in budgets(name, least, plan.peak)]
        fits = zip(plans, BUDGETS[name], strict=True)
        found[name] = least, [made.seconds if made.peak <= budget else None for made, budget in fits]
    return found


def numbers(module: Any, *names: str, factors: tuple[float, ...] = (0.5, 2)) -> Iterator[tuple[str, Any]]:
    for name in names:
        for factor in factors:
            value = getattr(module, name)
            other = type(value)(value * factor)
            yield f"{module.__name__.removeprefix('lowtide.')}.{name} = {other}", patched(module, name, other)


def of_search() -> Iterator[tuple[str, Any]]:
    yield "search.Effort.edits halved", effort(0.5)
    yield "search.Effort.edits doubled", effort(2)
    for name, values in {"REACH": "2 32", "LONGEST": "8 128", "LEAST_PROGRESS": "0.9 0.98"}.items():
        for value in values.split():
            yield f"descent.c {name} = {value}", defined(name, value)
    for name, others in {
        "EXPONENTS": ((1.0, 1.4, 0.7, 2.0, 0.5), (1.4, 1.0)),
        "FINER": ((), (0.4, 0.1)),
        "LONG": (2, 6),
        "HEAT": ((0.025, 0.001), (0.1, 0.004)),
        "PRICES": ((15.0, 2.5), (60.0, 10.0)),
    }.items():
        for other in others:
            yield f"search.{name} = {other}", patched(search, name, other)
    yield from numbers(search, "STEPS", "MOST_EDITS", "MOST_LONG", "MOST_STEPS", "MOST_BUDGETS")
    yield from numbers(ruin, "CALL", "SHARE", "LARGER", "NEIGHBOURS")
    yield from numbers(seeds, "MOST_SEQUENCES")
    for value in ["4", "16"]:
        yield f"descent.c EDITS = {value}", defined("EDITS", value)


def of_fusion() -> Iterator[tuple[str, Any]]:
    yield from numbers(fused_graph, "_SMALL", "_MUCH", "_MOST_INSIDE")
    yield from numbers(traffic, "_LONG")
    yield from numbers(work, "PER_BYTE")
    yield from numbers(op_classes, "_MOST_JOINED")


PARTS: dict[str, tuple[Callable[[], Found], Callable[[], Iterator[tuple[str, Any]]]]] = {
    "search": (searched, of_search),
    "fusion": (compiled, of_fusion),
}


def compared(before: Found, after: Found) -> dict[str, Any]:
    pairs = [
        (old, new)
        for name, (_, seconds) in before.items()
        for old, new in zip(seconds, after[name][1], strict=True)
    ]
    slower = [new / old - 1 for old, new in pairs if old and new] or [0.0]
    larger = [after[name][0] / least - 1 for name, (least, _) in before.items()]
    return {
        "slower": [round(each, 4) for each in (min(slower), statistics.median(slower), max(slower))],
        "moved": sum(old != new for old, new in pairs),
        "of": len(pairs),
        "smallest_peak": [round(each, 4) for each in (min(larger), max(larger))],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=PARTS, help="one part alone")
    parser.add_argument("--large", action="store_true", help="steps of 120 ops, which are not annealed")
    parser.add_argument(
        "--match", default="", help="only constants whose name contains one of these, as in LONG,CALL"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    LARGE.extend([True] * args.large)
    for part in [args.only] if args.only else PARTS:
        plan, constants = PARTS[part]
        before = plan()
        for name, other in constants():
            if not any(word in name for word in args.match.split(",")):
                continue
            with other:
                after = plan()
            row = {"constant": name, "large": args.large, **compared(before, after)}
            print(json.dumps(row), flush=True)
            with args.out.open("a") as file:
                file.write(json.dumps({**row, "commit": commit(), "torch": torch.__version__}) + "\n")


if __name__ == "__main__":
    main()
