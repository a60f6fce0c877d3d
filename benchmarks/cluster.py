"""Will it fit on a cluster? An 8B language model over 8 and 64 GPUs that are not here, one of them planned.

python benchmarks/cluster.py benchmarks/results/cluster.jsonl      # plan, and write a line per result
python benchmarks/cluster.py benchmarks/results/cluster.jsonl --table

The model has the shape of Llama 3 8B in bf16, and AdamW's state in the dtype of the parameters; every rank
has a batch of one text of 8192 tokens. Parameters are sharded over all ranks and gathered where they are
read. By one simulator: keeping everything, a checkpoint around every block, and Lowtide's frontier, with the
plan that is as small as the checkpointed one. Prices are rooflines; collectives overlap with nothing.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import lowtide
from commit import commit
from language import Llama
from lowtide.planner.per_block import per_block_schedule

DEVICE, LENGTH, VOCABULARY = "H100", 8192, 128256
RANKS = (8, 64)
POINTS = 6

Row = dict[str, Any]


def llama_8b(layers: int = 32) -> torch.nn.Module:
    """Llama 3 8B on the meta device; its head is not tied to the embedding."""
    with torch.device("meta"):
        model = Llama(layers, 4096, VOCABULARY, heads=32, groups=8, hidden=14336)
        model.head.weight = torch.nn.Parameter(torch.empty_like(model.head.weight))
    return model


def rows(model: torch.nn.Module, ranks: int) -> Iterator[Row]:
    """What one rank of so many takes, by each way."""
    text = torch.empty(1, LENGTH, dtype=torch.int64, device="meta")
    start = time.process_time()
    optimizer = torch.optim.AdamW(model.parameters())
    vanilla = lowtide.plan(model, text, text, device=DEVICE, ranks=ranks, optimizer=optimizer)
    captured = time.process_time() - start
    graph = vanilla.graph
    yield row(ranks, "keep everything", vanilla.timeline) | {"capture_cpu_seconds": round(captured, 1)}
    schedule = per_block_schedule(graph)
    assert schedule is not None
    by_hand = lowtide.simulate(graph, schedule)
    yield row(ranks, "checkpoint every block", by_hand)
    start = time.process_time()
    found = lowtide.frontier(graph)
    searched = {"search_cpu_seconds": round(time.process_time() - start, 1)}
    yield row(ranks, "lowtide at that peak", found.best(by_hand.peak).timeline) | searched
    for plan in lowtide.frontier(graph, points=POINTS):
        yield row(ranks, "lowtide", plan.timeline)


def row(ranks: int, tool: str, timeline: lowtide.Timeline) -> Row:
    return {
        "commit": commit(),
        "torch": torch.__version__,
        "device": DEVICE,
        "ranks": ranks,
        "tool": tool,
        "peak": timeline.peak,
        "seconds": timeline.seconds,
        "extra": timeline.extra,
    }


def table(lines: list[Row]) -> str:
    """The results as a table."""
    shown = [f"| ranks | one {DEVICE} of them, by | peak | extra time |", "|---|---|---|---|"]
    for each in lines:
        peak, extra = f"{each['peak'] / 2**30:.1f} GiB", f"{each['extra']:+.1%}"
        shown.append(f"| {each['ranks']} | {each['tool']} | {peak} | {extra} |")
    return "\n".join(shown)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("--table", action="store_true", help="print the table of what was found")
    chosen = parser.parse_args()
    if chosen.table:
        print(table([json.loads(line) for line in chosen.results.read_text().splitlines()]))
        return
    model = llama_8b()
    with chosen.results.open("w") as file:
        for ranks in RANKS:
            for each in rows(model, ranks):
                file.write(json.dumps(each) + "\n")
                file.flush()


if __name__ == "__main__":
    main()
