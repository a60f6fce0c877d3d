"""What is on the GPU at the peak of a step: by the prediction, and by the allocator's own record.

    PYTHONPATH=src python benchmarks/peak.py bert_base 80%
    PYTHONPATH=src python benchmarks/peak.py unet min --executor inductor

The first part lists the calls of the compiled graphs at which most bytes are predicted, with the workspace
of each. The second lists the largest blocks that were there when the allocator's count was highest, with the
line of generated code, or of Python, that asked for each. For those who look for the cause of a difference.
"""

from __future__ import annotations

import argparse
import linecache
from collections.abc import Callable, Iterable
from typing import Any

import torch

import lowtide
from headtohead_models import SUBJECTS
from lowtide.run.generated_code.footprint import Footprint
from lowtide.run.inductor import peak

MIB = 2**20
FEW = 6
SEVERAL = 20


def told(original: Callable[..., int]) -> Callable[..., int]:
    """The function that finds the peak of a compiled graph, which also prints its largest moments."""

    def tell(found: Footprint, workspace: Any) -> int:
        print(f"a compiled graph of {len(found.moments)} calls")
        rows = sorted(((m.bytes + workspace.at(m), workspace.at(m), m) for m in found.moments), key=first)
        for whole, own, moment in rows[: -FEW - 1 : -1]:
            print(f"  {whole / MIB:9.1f} MiB, {own / MIB:8.1f} of workspace: {moment.call} {moment.outputs}")
        return original(found, workspace)

    return tell


def first(row: tuple[Any, ...]) -> Any:
    return row[0]


def at_the_peak(trace: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The blocks that were there when they took most."""
    live: dict[int, dict[str, Any]] = {}
    now = most = 0
    found: list[dict[str, Any]] = []
    for event in trace:
        if event["action"] == "alloc":
            live[event["addr"]] = event
            now += event["size"]
            if now > most:
                most, found = now, list(live.values())
        elif event["action"] == "free_completed" and event["addr"] in live:
            now -= live.pop(event["addr"])["size"]
    return found


def line_of(event: dict[str, Any]) -> str:
    """The line that asked for a block: of generated code if there is one."""
    frames = [frame for frame in event["frames"] if frame["filename"].endswith(".py")]
    generated = [frame for frame in frames if "buf" in text_of(frame) and "torch/" not in frame["filename"]]
    chosen = (generated or frames)[:1]
    return text_of(chosen[0])[:140] if chosen else "?"


def text_of(frame: dict[str, Any]) -> str:
    return linecache.getline(frame["filename"], frame["line"]).strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", choices=list(SUBJECTS))
    parser.add_argument("budget", help='as lowtide.cap takes it: "min", "100%%", "8GiB"')
    parser.add_argument("--executor", choices=("eager", "inductor"), default="inductor")
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    peak._peak = told(peak._peak)
    model, batch = SUBJECTS[args.model].build("cuda")
    lowtide.cap(model, args.budget, executor=args.executor)
    for _ in range(2):
        model(*batch).backward()
        model.zero_grad()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=1_000_000)
    model(*batch).backward()
    torch.cuda.synchronize()
    plan = lowtide.plan_of(model)
    assert plan is not None
    measured = torch.cuda.max_memory_allocated()
    print(f"predicted {plan.peak / MIB:.1f} MiB, measured {measured / MIB:.1f}, before {before / MIB:.1f}")
    blocks = at_the_peak(torch.cuda.memory._snapshot()["device_traces"][0])
    for event in sorted(blocks, key=lambda event: -event["size"])[:SEVERAL]:
        print(f"  {event['size'] / MIB:9.1f} MiB  {line_of(event)}")


if __name__ == "__main__":
    main()
