"""Models whose step is not one graph, with `allow_breaks=True`: how many pieces, and what lies outside.

    PYTHONPATH=src python benchmarks/models_in_pieces.py            # those that models.jsonl has as refused
    PYTHONPATH=src python benchmarks/models_in_pieces.py ctrl led   # these

Each model of `models.py` that is refused as a whole is run by `lowtide.verify` at the smallest peak of its
pieces together. A row has the pieces, the most that code between them was seen to take, the lines at
which torch ended a piece (where most is taken first), whether the cap changed a bit, and both peaks.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

import lowtide
from commit import commit
from models import FirstLoss, entries, installed, only_imported, read

FILE = Path(__file__).parent / "results" / "models_in_pieces.jsonl"
NOT_CAPTURED = "not captured"


def row(make: Any) -> dict[str, Any]:
    """What comes of one model in pieces under the smallest cap."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, batch = make()
    model.train()
    found = lowtide.verify(model, kwargs=batch, budget="min", loss=FirstLoss(), outside=0, allow_breaks=True)
    graph = found.plan.graph
    between = [op for op in graph.ops if op.target == NOT_CAPTURED]
    if not between:
        raise lowtide.LowtideError("its pieces are not known before a call, and not planned together")
    taken = {op.name: op.workspace + sum(graph.value[name].bytes for name in op.writes) for op in between}
    most_first = sorted(between, key=lambda op: -taken[op.name])
    return {
        "pieces": sum(op.name.startswith("before piece") for op in between),
        "between": max(taken.values()),
        "outside": list(dict.fromkeys(op.source for op in most_first if op.source)),
        "bitwise": found.equal,
        "cap_changed_nothing": found.exact,
        "uncapped": found.uncapped.peak,
        "predicted": found.predicted,
        "measured": found.measured,
    }


def main() -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    only_imported()
    refused = {name for (library, name), each in read().items() if not each["captured"]}
    wanted = set(sys.argv[1:]) or refused
    kept = [json.loads(line) for line in FILE.read_text().splitlines()] if FILE.exists() else []
    rows = {each["model"]: each for each in kept}
    for name, make in entries("transformers"):
        if name not in wanted:
            continue
        try:
            made = row(make)
        except Exception as error:  # of the table: torch cannot capture some in pieces either
            print(f"{name}: {type(error).__name__}: {str(error).partition(chr(10))[0]}", flush=True)
            continue
        about = {"version": installed("transformers"), "torch": torch.__version__, "commit": commit()}
        rows[name] = {"model": name, **about, **made}
        FILE.write_text("".join(json.dumps(rows[key]) + "\n" for key in sorted(rows)))
        print(json.dumps(rows[name]), flush=True)


if __name__ == "__main__":
    main()
