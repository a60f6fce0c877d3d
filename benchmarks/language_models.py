"""Fine-tune a language model of `transformers`: peak, reserved memory and time of the whole step, by tool.

    PYTHONPATH=src python benchmarks/language_models.py --out benchmarks/results/language_models-h200.jsonl
    PYTHONPATH=src python benchmarks/language_models.py --subjects llama-3b --settings eager,lowtide:60GiB

The step is the one that people write: `model(input_ids=x, labels=x).loss`, backward, a step of fused AdamW,
`zero_grad`. Tools: plain PyTorch, `gradient_checkpointing_enable()`, torch.compile, both together, and
Lowtide at a budget ("lowtide" is its eager executor), with `split=True` (":split") and
`step_in_backward=True` (":step"). Each setting starts from a new model, the same each time, so that losses
can be compared; all of a subject run in one process. Peaks are `max_memory_allocated` and
`max_memory_reserved` over the timed steps, the optimizer's included; set-up is the time of the first step,
with all that is planned or compiled for it. Rows are written as they are made; those that the file has of
this commit and torch are left out, so that a stopped run goes on. An error in a row is that row's result.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

import lowtide
from commit import commit
from language_models_steps import SUBJECTS, Subject
from row_files import Row, append, there

WARM_UP = 2
KNOWN_BY = ("subject", "setting")
SIZES = ("allocated", "predicted", "reserved", "predicted_reserved", "smallest")


class Loop:
    """A model, its batch and its optimizer, and the step of a training loop."""

    def __init__(self, subject: Subject, device: str, *, tiny: bool, length: int | None = None) -> None:
        self.model, self.ids = subject.build(device, tiny=tiny, length=length)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
        self.call: Callable[..., Any] = self.model

    def step(self) -> torch.Tensor:
        loss: torch.Tensor = self.call(input_ids=self.ids, labels=self.ids).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def prepare(loop: Loop, setting: str) -> None:
    """Put a tool in force."""
    tool, *words = setting.split(":")
    if "checkpoint" in tool:
        loop.model.gradient_checkpointing_enable()  # type: ignore[operator]
    if tool.startswith("compile"):
        loop.call = torch.compile(loop.model)
    if tool.startswith("lowtide"):
        budget, *asked = words
        choices: dict[str, Any] = {"executor": "inductor"} if tool.endswith("inductor") else {}
        choices |= {"split": True} if "split" in asked else {}
        choices |= {"step_in_backward": True} if "step" in asked else {}
        lowtide.cap(loop.model, budget, optimizer=loop.optimizer, **choices)


def measured(loop: Loop, steps: int) -> Row:
    """The first step by itself, then the timed ones."""
    start = time.perf_counter()
    loss = loop.step().item()
    row: Row = {"loss": loss, "setup_seconds": round(time.perf_counter() - start, 1)}
    if loop.ids.device.type != "cuda":
        found = lowtide.measure(loop.step)
        return row | {"allocated": found.peak, "seconds": found.seconds}
    for _ in range(WARM_UP):
        loop.step()
    torch.cuda.reset_peak_memory_stats()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    marks[0].record()
    for mark in marks[1:]:
        loop.step()
        mark.record()
    torch.cuda.synchronize()
    times = [one.elapsed_time(other) / 1e3 for one, other in pairwise(marks)]
    return row | {
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        "seconds": statistics.median(times),
        "seconds_spread": max(times) - min(times),
    }


def bench(subject: Subject, setting: str, device: str, *, steps: int, tiny: bool) -> Row:
    """One row of a subject's table."""
    loop = Loop(subject, device, tiny=tiny)
    try:
        prepare(loop, setting)
        row = measured(loop, steps)
        if setting.startswith("lowtide"):
            plan = lowtide.plan_of(loop.model)
            assert plan is not None
            row |= {"budget": plan.budget, "predicted": plan.allocated, "predicted_extra": plan.extra}
            row |= {"predicted_reserved": plan.reserved, "arena": plan.arena, "ops": len(plan.graph.ops)}
    except lowtide.BudgetTooSmall as error:
        row = {"error": "budget too small", "budget": error.budget, "smallest": error.smallest}
    except torch.cuda.OutOfMemoryError:
        row = {"error": "out of memory"}
    except Exception as error:
        row = {"error": f"{type(error).__name__}: {error}"[:500]}
    return row


def clear(device: str) -> None:
    """Let the next row find the device as the first one did; without a device that works there is none."""
    torch._dynamo.reset()
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def facts(device: str) -> Row:
    """What all rows of a run have in common."""
    import transformers

    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "allocator": os.environ.get("PYTORCH_ALLOC_CONF", os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")),
        "commit": commit(),
    }


def say(row: Row) -> None:
    """A short line for whoever watches."""
    sizes = " ".join(f"{key} {row[key] >> 20:,}" for key in SIZES if row.get(key))
    print(
        f"{row['subject']:14} {row['setting']:30} {sizes} MiB, {row.get('seconds', 0) * 1e3:.1f} ms, set-up "
        f"{row.get('setup_seconds', 0)} s, loss {row.get('loss', 0):.6f} {row.get('error', '')}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, help="append a JSON line per row to this file")
    parser.add_argument("--subjects", default=",".join(SUBJECTS))
    parser.add_argument("--settings", help="instead of all of a subject's")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--tiny", action="store_true", help="small models on the CPU, to try the script")
    chosen = parser.parse_args()
    device = "cpu" if chosen.tiny else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device; --tiny tries it on the CPU")
    common = facts(device)
    done = there(chosen.out, KNOWN_BY, common)
    for name in chosen.subjects.split(","):
        subject = SUBJECTS[name]
        for setting in chosen.settings.split(",") if chosen.settings else subject.settings:
            if (name, setting) in done:
                continue
            command = f"python benchmarks/language_models.py --subjects {name} --settings {setting}"
            row = {"subject": name, "setting": setting, **common, "command": command}
            row |= bench(subject, setting, device, steps=chosen.steps, tiny=chosen.tiny)
            say(row)
            append(row, chosen.out)
            clear(device)


if __name__ == "__main__":
    main()
