"""What each check of a capped call costs in microseconds, beside the step of a small model.

python benchmarks/call_checks.py            # some seconds; appends to results/call_checks.jsonl
python benchmarks/call_checks.py --print    # appends nothing

Each check is called alone, as a capped call makes it, on the step of a small model: the median of several
runs of many calls. The steps, plain and capped at keeping everything, are timed in turns in the same run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lowtide
from commit import commit
from lowtide.entry.in_place import capped_of
from lowtide.entry.whole_steps import forced_eager, refuse_what_is_not_captured
from lowtide.pipeline.compiled_calls import key_of
from lowtide.pipeline.in_flight import Call, held_beside
from lowtide.pipeline.optimizer_steps import _look

RESULTS = Path(__file__).parent / "results" / "call_checks.jsonl"
LAYERS, WIDTH, ROWS = 12, 64, 32
CALLS, RUNS = 2000, 7


class Model(nn.Module):
    """A chain of small layers: a step of some hundred small kernels, where checks would show most."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def microseconds(call: Callable[[], Any]) -> float:
    call()
    times = []
    for _ in range(RUNS):
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter() - start) / CALLS)
    return statistics.median(times) * 1e6


def checks(device: torch.device) -> Iterator[tuple[str, str, float]]:
    """Each check: what is noticed, when it is looked at, and what that costs."""
    model, x = Model().to(device), torch.randn(ROWS, WIDTH, device=device)
    optimizer = torch.optim.AdamW(model.parameters())
    lowtide.cap(model, "min", optimizer=optimizer)
    for _ in range(2):
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()
    capped = capped_of(model)
    assert capped is not None
    (*_, entry) = capped.entries.values()
    (piece,) = entry.ran
    plan, watch, caller = piece.plan, piece.runner.watch, capped.caller
    assert plan is not None
    args: list[Any] = [*model.parameters(), x]
    after_forward = watch.after_forward(args)
    call = Call(caller, plan, (), plan.budget)
    yield (
        "shapes, dtypes, devices, autocast, hooks on all modules, DDP",
        "call",
        microseconds(lambda: key_of((x,), {})),
    )
    yield (
        "torch.compile switched off, an export, a stance",
        "call",
        microseconds(lambda: (refuse_what_is_not_captured(), forced_eager())),
    )
    yield "calls in flight", "call", microseconds(lambda: held_beside(caller))
    yield "gradients that are there", "call", microseconds(entry.gradients)
    yield "optimizer state that appeared", "call", microseconds(entry.uncounted_state)
    yield (
        "inputs that the backward recomputes from: a look",
        "call",
        microseconds(lambda: watch.after_forward(args)),
    )
    if after_forward is not None:
        tensors = [args[each.place] for each in watch.inputs]
        yield (
            "the same inputs: versions, addresses, words",
            "backward",
            microseconds(lambda: watch.look(tensors)),
        )
    yield "the autocast of the backward", "backward", microseconds(call.begin_backward)
    yield "training past the cap, optimizer state", "optimizer step", microseconds(lambda: _look(optimizer))


def steps(device: torch.device) -> dict[str, float]:
    """A step of the same model, plain and capped, in turns: medians in microseconds."""
    x = torch.randn(ROWS, WIDTH, device=device)
    plain, capped = Model().to(device), lowtide.cap(Model().to(device), "1GiB")
    times: dict[str, list[float]] = {"plain": [], "capped": []}
    for _ in range(50):
        for name, model in (("plain", plain), ("capped", capped)):
            start = time.perf_counter()
            for _ in range(10):
                model(x).backward()
                model.zero_grad()
            if device.type == "cuda":
                torch.cuda.synchronize()
            times[name].append((time.perf_counter() - start) / 10 * 1e6)
    return {name: statistics.median(found) for name, found in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--print", action="store_true", help="append nothing to the results")
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    facts = {"commit": commit(), "torch": torch.__version__, "device": name}
    rows = [
        {**facts, "check": what, "when": when, "microseconds": round(cost, 2)}
        for what, when, cost in checks(device)
    ]
    rows.append({**facts, "step": {key: round(value, 1) for key, value in steps(device).items()}})
    for row in rows:
        print(json.dumps(row))
    if not parser.parse_args().print:
        with RESULTS.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    main()
