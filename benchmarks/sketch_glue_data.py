"""Tasks of GLUE (Wang et al. 2018) from their files, and the figures they are judged by. No Lowtide here.

Lines are split at tabs without quoting, as sentences contain bare double quotes. Sentences are cut to 128
tokens. The metrics are those of GLUE: Matthews correlation for CoLA, accuracy for RTE and SST-2, Pearson
and Spearman correlation for STS-B.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

LONGEST = 128
MOST_ALIKE = 5.0
"""Two sentences of STS-B that mean the same; as a target it is one."""
Figures = dict[str, float]


def matthews(found: np.ndarray, true: np.ndarray) -> Figures:
    return {"matthews": correlation(found.argmax(1), true)}


def accuracy(found: np.ndarray, true: np.ndarray) -> Figures:
    return {"accuracy": float((found.argmax(1) == true).mean())}


def correlations(found: np.ndarray, true: np.ndarray) -> Figures:
    found = found[:, 0]
    return {"pearson": correlation(found, true), "spearman": correlation(ranks(found), ranks(true))}


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Pearson's; of two classes it is Matthews'. Nothing correlates with a constant."""
    a, b = (side.astype(float) - side.mean() for side in (a, b))
    norm = float(np.sqrt((a * a).sum() * (b * b).sum()))
    return float((a * b).sum()) / norm if norm else 0.0


def ranks(values: np.ndarray) -> np.ndarray:
    """Where each value stands; equal ones share the mean of their places."""
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count - 1) / 2)[place]


@dataclass(frozen=True)
class Task:
    """Where the columns of a task are, how long it is trained, and `most` examples if not all."""

    folder: str
    sentences: tuple[int, ...]
    label: int
    metric: Callable[[np.ndarray, np.ndarray], Figures]
    epochs: int
    most: int | None = None
    header: bool = True
    labels: tuple[str, ...] = ("0", "1")

    @property
    def outputs(self) -> int:
        return max(len(self.labels), 1)

    def target(self, text: str) -> float:
        return self.labels.index(text) if self.labels else float(text) / MOST_ALIKE


TASKS = {
    "cola": Task("CoLA", (3,), 1, matthews, epochs=4, header=False),
    "rte": Task("RTE", (1, 2), 3, accuracy, epochs=4, labels=("entailment", "not_entailment")),
    "sst2": Task("SST-2", (0,), 1, accuracy, epochs=2, most=8000),
    "stsb": Task("STS-B", (7, 8), 9, correlations, epochs=3, labels=()),
}


@dataclass(frozen=True)
class Examples:
    """Tokens of all examples on a device, padded to the longest, and their lengths on the host."""

    tokens: Tensor
    kinds: Tensor
    targets: Tensor
    lengths: Tensor

    def __len__(self) -> int:
        return len(self.lengths)

    def batch(self, index: Tensor) -> dict[str, Tensor]:
        """Some of them as a model of transformers takes them, no longer than the longest."""
        lengths, device = self.lengths[index], self.tokens.device
        longest = int(lengths.max())
        index = index.to(device, non_blocking=True)
        mask = torch.arange(longest, device=device) < lengths.to(device, non_blocking=True).unsqueeze(1)
        return {
            "input_ids": self.tokens[index, :longest],
            "token_type_ids": self.kinds[index, :longest],
            "attention_mask": mask.long(),
            "labels": self.targets[index],
        }


def read(task: Task, path: Path) -> tuple[list[list[str]], list[float]]:
    """The columns of sentences, and the targets."""
    lines = path.read_text(encoding="utf-8").rstrip("\n").split("\n")[1 if task.header else 0 :]
    rows = [line.rstrip("\r").split("\t") for line in lines]
    return [[row[column] for row in rows] for column in task.sentences], [
        task.target(row[task.label]) for row in rows
    ]


def load(task: Task, data: Path, split: str, tokenizer: Any, device: str, most: int | None) -> Examples:
    """A split as tensors; of a subset always the same examples."""
    columns, targets = read(task, data / task.folder / f"{split}.tsv")
    if most is not None and most < len(targets):
        chosen = torch.randperm(len(targets), generator=torch.Generator().manual_seed(0))[:most].tolist()
        columns, targets = [[column[i] for i in chosen] for column in columns], [targets[i] for i in chosen]
    made = tokenizer(*columns, truncation=True, max_length=LONGEST, padding="longest", return_tensors="pt")
    kind = torch.long if task.labels else torch.float
    return Examples(
        made["input_ids"].to(device),
        made["token_type_ids"].to(device),
        torch.tensor(targets, dtype=kind, device=device),
        made["attention_mask"].sum(1),
    )
