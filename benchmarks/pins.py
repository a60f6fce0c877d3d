"""The plans of the zoo and of the corpus, pinned: a change that is not meant to change plans changes none.

    PYTHONPATH=src python benchmarks/pins.py                  # what differs from results/pins.jsonl
    PYTHONPATH=src python benchmarks/pins.py --write          # makes the rows anew
    PYTHONPATH=src python benchmarks/pins.py --only zoo

A row has the graph and the schedule by their hashes, and what the simulator says of them. The zoo's steps are
planned for the CPU with both executors, the corpus's for an H200 with the first. Prices are the roofline's,
and the search counts its moves and not the time, so a plan is the same on every machine with the same torch.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import lowtide

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
import corpus
from zoo import ZOO

FILE = Path(__file__).parent / "results" / "pins.jsonl"
BUDGETS = ("100%", "70%", "50%", "min")
CORPUS = ("resnet50", "unet", "gpt2_medium", "vit_b16")


def row(plan: lowtide.Plan) -> dict[str, Any]:
    schedule = hashlib.sha256(plan.schedule.to_json().encode()).hexdigest()[:12]
    seconds = float(f"{plan.timeline.seconds:.9g}")
    return {"graph": plan.graph.fingerprint[:12], "schedule": schedule, "peak": plan.peak, "seconds": seconds}


def refused(make: Callable[[], lowtide.Plan]) -> dict[str, Any]:
    """The row of a plan, or the smallest peak where there is none."""
    try:
        return row(make())
    except lowtide.BudgetTooSmall as error:
        return {"smallest": error.smallest}
    except lowtide.LowtideError as error:
        return {"error": type(error).__name__}


def zoo_rows() -> Iterator[tuple[str, dict[str, Any]]]:
    for name, case in ZOO.items():
        for executor in ("eager", "inductor"):
            for budget in BUDGETS:
                torch.manual_seed(0)
                model, args, kwargs = case.make()

                def make(model=model, args=args, kwargs=kwargs, budget=budget, executor=executor):
                    return lowtide.plan(model, *args, kwargs=kwargs, budget=budget, executor=executor)

                yield f"zoo/{name}/{executor}/{budget}", refused(make)
                torch._dynamo.reset()


def corpus_rows() -> Iterator[tuple[str, dict[str, Any]]]:
    for name in CORPUS:
        with torch.device("meta"):
            model, batch = corpus.CORPUS[name].build()
        for budget in ("50%", "min"):

            def make(model=model, batch=batch, budget=budget):
                whole = lowtide.plan(model, *batch, device=corpus.DEVICE)
                asked = budget if budget == "min" else whole.peak // 2
                return lowtide.plan(model, *batch, device=corpus.DEVICE, budget=asked)

            yield f"corpus/{name}/{budget}", refused(make)
            torch._dynamo.reset()


PARTS = {"zoo": zoo_rows, "corpus": corpus_rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the rows instead of comparing")
    parser.add_argument("--only", choices=PARTS, help="one part alone")
    args = parser.parse_args()
    kept = {} if not FILE.exists() else {r.pop("name"): r for r in map(json.loads, FILE.open())}
    found = dict(kept)
    differ = 0
    for part in [args.only] if args.only else PARTS:
        for name, made in PARTS[part]():
            found[name] = made
            if not args.write and kept.get(name) != made:
                differ += 1
                print(f"{name}: {kept.get(name)} is now {made}", flush=True)
    if args.write:
        FILE.write_text("".join(json.dumps({"name": name, **each}) + "\n" for name, each in found.items()))
    print(f"{len(found)} plans" + ("" if args.write else f", {differ} differ"))
    sys.exit(bool(differ))


if __name__ == "__main__":
    main()
