"""What a process of the hard limit does: the loop of one model under each of its budgets.

On a GPU the process may reserve the budget and not a byte more. A row is yielded as it is done.
"""

from __future__ import annotations

import gc
import gzip
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

import headtohead_models
import lowtide
import vision
from headtohead_models import Batch, Step, Subject, of_images
from row_files import Row

__all__ = ["SMALLER", "STEPS", "SUBJECTS", "Trial", "as_promised", "outcomes"]

STEPS = 10
SMALLER = 2
TRACED = 400_000
"""Requests of which a trace has at most the last ones."""


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
    except Exception as error:
        row |= {"outcome": "failed", "error": in_words(error)}
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
    Path(trial.traces).mkdir(parents=True, exist_ok=True)
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
        except Exception as error:
            yield {**head, "outcome": "failed", "error": in_words(error)}
            continue
        row = happened(trial, size, device)
        yield {**head, **row}
        if asked == "min" and row["outcome"] == "refused":
            yield {**head, "asked": "the least named", **happened(trial, row["smallest"], device)}


def in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:500]
