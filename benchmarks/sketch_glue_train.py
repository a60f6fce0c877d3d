"""One training of the fine-tuning benchmark: an encoder from its folder, a task, a kind of sketch, a seed."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import lowtide
from lowtide.sketching import dense
from sketch_glue_data import TASKS, Examples, load
from sketch_glue_results import Row

os.environ["HF_HUB_OFFLINE"] = "1"

WARM_UP = 0.1
"""The share of the steps over which the learning rate rises."""


@dataclass(frozen=True)
class Setting:
    """What all runs have in common."""

    encoder: Path
    data: Path
    device: str
    batch: int
    rate: float
    epochs: int | None
    examples: int | None
    until: float


@dataclass(frozen=True)
class Run:
    """One training: a task, a kind of sketch as in "strided 20%", a seed."""

    task: str
    kind: str
    seed: int

    @property
    def row(self) -> Row:
        return {"task": self.task, "kind": self.kind, "seed": self.seed}


@cache
def examples(setting: Setting, task: str, split: str) -> Examples:
    from transformers import AutoTokenizer

    found, train = TASKS[task], split == "train"
    most = setting.examples or found.most if train else None
    tokenizer = AutoTokenizer.from_pretrained(setting.encoder)
    return load(found, setting.data, split, tokenizer, setting.device, most)


@cache
def fuse_dense_sketches() -> None:
    """Make the matrices of dense sketches in one kernel each and in few parts, or they take all the time."""
    dense._BLOCK = 2**23
    for kind in (dense.Gaussian, dense.Rademacher):
        kind.block = torch.compile(kind.block, dynamic=True)  # type: ignore[method-assign]


def build(setting: Setting, run: Run) -> nn.Module:
    from transformers import AutoModelForSequenceClassification
    from transformers.utils import logging

    logging.set_verbosity_error()  # it would tell of each model that its classifier is new
    logging.disable_progress_bar()
    task = TASKS[run.task]
    problem = "single_label_classification" if task.labels else "regression"
    model = AutoModelForSequenceClassification.from_pretrained(
        setting.encoder, num_labels=task.outputs, problem_type=problem, dtype=torch.float32
    ).to(setting.device)
    kind, _, rate = run.kind.partition(" ")
    if kind == "exact":
        return model
    if setting.device == "cuda":
        fuse_dense_sketches()
    if rate:
        share = int(rate.rstrip("%")) / 100
        return lowtide.sketch(model, share, kind=kind, layers="*.encoder", rows="attention_mask")
    return lowtide.sketch(model, kind=kind, layers="*.encoder")


def train(setting: Setting, run: Run) -> Row | None:
    """A row, or nothing if the deadline came before."""
    start = time.perf_counter()
    if time.time() > setting.until:
        return None
    torch.manual_seed(run.seed)
    model, data = build(setting, run), examples(setting, run.task, "train")
    noise = noise_of(model, data, setting.batch) if run.seed == 0 and run.kind != "exact" else {}
    fused = setting.device == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), setting.rate, weight_decay=0.01, fused=fused)
    batches = list(shuffled(len(data), setting.batch, setting.epochs or TASKS[run.task].epochs, run.seed))
    model.train()
    losses = []
    for step, index in enumerate(batches):
        if time.time() > setting.until:
            return None
        for group in optimizer.param_groups:
            group["lr"] = setting.rate * height(step / len(batches))
        loss = model(**data.batch(index)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    found = torch.stack(losses).cpu()
    last = found[-max(len(found) // 10, 1) :]
    figures = judge(model, examples(setting, run.task, "dev"), run.task)
    return {
        **run.row,
        **figures,
        "loss": float(found.mean()),
        "last_loss": float(last.mean()),
        **noise,
        "steps": len(batches),
        "batch": setting.batch,
        "rate": setting.rate,
        "examples": len(data),
        "seconds": round(time.perf_counter() - start, 1),
    }


def noise_of(model: nn.Module, data: Examples, batch: int) -> Row:
    """The noise of the sketches on the first batch, the median of the layers', in variances of SGD itself."""
    found = lowtide.noise(model.train(), kwargs=data.batch(torch.arange(min(batch, len(data)))))
    return {"noise": statistics.median(layer.ratio for layer in found.layers)}


def shuffled(count: int, batch: int, epochs: int, seed: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        yield from torch.randperm(count, generator=generator).split(batch)


def height(share: float) -> float:
    """The learning rate after a share of the steps, of its largest."""
    return min((share + 1e-3) / WARM_UP, (1 - share) / (1 - WARM_UP))


@torch.no_grad()
def judge(model: nn.Module, data: Examples, task: str) -> Row:
    model.eval()
    parts = data.lengths.argsort().split(256)
    found = torch.cat([model(**data.batch(part)).logits for part in parts]).float().cpu().numpy()
    true = data.targets.cpu().numpy()[torch.cat(parts).numpy()]
    return dict(TASKS[task].metric(found.astype(np.float64), true))
