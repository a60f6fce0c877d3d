"""Steps whose batches change their shape: what planning takes, and whether every shape keeps its prediction.

    python benchmarks/changing_shapes.py epoch FOLDER --label after    # a folder of GLUE: CoLA, SST-2
    python benchmarks/changing_shapes.py exact --sizes 200

`epoch` trains a small GPT-2 on batches of real sentences, each padded to its longest: plainly, under a cap,
and with `torch.compile(dynamic=True)` where `--compiled` is given, all in one run on one thread. What counts
is the processor's time. *Other than training* is what the loop took more than the same steps take once their
shapes are known; no cache of an earlier run is read. `exact` runs steps of random sizes with and without a
cap and compares all bits and the bytes. Both append to results/changing_shapes.jsonl; the sentences stay
where they are.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import os
import random
import re
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lowtide
from commit import commit

RESULTS = Path(__file__).parent / "results" / "changing_shapes.jsonl"
COLUMNS = {"CoLA": 3, "SST-2": 0}
VOCABULARY, LONGEST, ROWS = 512, 128, 8

Batch = dict[str, torch.Tensor]


class CellLoop(nn.Module):
    """An LSTM cell, called once for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell = nn.Embedding(VOCABULARY, 16), nn.LSTMCell(16, 16)
        self.head = nn.Linear(16, 1)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        state = None
        for x in self.embed(input_ids).unbind(1):
            state = self.cell(x, state)
        assert state is not None
        loss: torch.Tensor = self.head(state[0]).pow(2).mean()
        return loss


class Convolutions(nn.Module):
    """Convolutions with batch statistics and dropout."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 8, 16, 16)
        layers = [
            layer
            for before, after in pairwise(widths)
            for layer in (nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU())
        ]
        self.body, self.head = nn.Sequential(*layers, nn.Dropout(0.1)), nn.Linear(16, 1)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.head(self.body(pixels).mean((2, 3))).pow(2).mean()
        return loss


def gpt2(width: int = 32, layers: int = 1) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    options = {"vocab_size": VOCABULARY, "n_positions": LONGEST, "n_embd": width, "n_layer": layers}
    model = GPT2LMHeadModel(GPT2Config(n_head=2, bos_token_id=0, eos_token_id=0, **options))
    model.loss_type = "ForCausalLM"
    return model


def _sizes(**more: Any) -> dict[str, Any]:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    return {**sizes, "num_attention_heads": 2, "max_position_embeddings": LONGEST, **more}


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_sizes(num_key_value_heads=1)))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(BertConfig(**_sizes(num_labels=2)))


def causal(length: int) -> Batch:
    ids = torch.randint(0, 64, (4, length))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def padded(length: int) -> Batch:
    """Rows of other lengths, so that the model makes a mask."""
    batch = causal(length)
    mask = (torch.arange(length) < torch.tensor([length, length - 3, length - 9, length])[:, None]).long()
    return {**batch, "attention_mask": mask}


def classified(length: int) -> Batch:
    return {**causal(length), "labels": torch.arange(4) % 2}


@dataclass(frozen=True)
class Case:
    """A model, its batches by the size that changes, and the range of that."""

    build: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    least: int
    most: int
    budget: str = "75%"


CASES = {
    "gpt2": Case(gpt2, padded, 24, LONGEST),
    "llama": Case(llama, causal, 24, LONGEST),
    "bert": Case(bert, classified, 24, LONGEST),
    "cnn": Case(Convolutions, lambda rows: {"pixels": torch.randn(rows, 3, 12, 12)}, 2, 64),
    "lstm": Case(CellLoop, lambda length: {"input_ids": torch.randint(0, 512, (64, length))}, 2, 12),
}


def backward(model: nn.Module, batch: Batch) -> torch.Tensor:
    """A step from the same random state each time; the model's gradients are those of this one alone."""
    model.zero_grad()
    torch.manual_seed(5)
    out = model(**batch)
    loss: torch.Tensor = out if isinstance(out, torch.Tensor) else out.loss
    del out
    loss.backward()
    return loss.detach()


def state(model: nn.Module, loss: torch.Tensor) -> list[torch.Tensor]:
    found = [p.grad for p in model.parameters() if p.grad is not None]
    return [loss, *found, *model.buffers(), torch.get_rng_state()]


@dataclass(frozen=True)
class Compared:
    """A step of one size with and without a cap: whether all bits are the same, and its bytes."""

    size: int
    same_bits: bool
    measured: int
    predicted: int
    budget: int
    extra: float


def compared(case: Case, sizes: list[int]) -> Iterator[Compared]:
    """Steps of these sizes, one after the other, of one capped model and its plain twin."""
    torch.manual_seed(0)
    model = case.build().train()
    twin = copy.deepcopy(model)
    lowtide.cap(model, case.budget, max_plans=len(sizes), outputs="free")
    for size in sizes:
        batch = case.batch(size)
        same = _same(model, twin, batch)
        measured = lowtide.measure(partial(backward, model, batch), device="cpu").peak
        backward(twin, batch)
        plan = lowtide.plan_of(model)
        assert plan is not None
        assert plan.budget is not None
        yield Compared(size, same, measured, plan.peak, plan.budget, plan.extra)


def _same(model: nn.Module, twin: nn.Module, batch: Batch) -> bool:
    pair = [state(each, backward(each, batch)) for each in (model, twin)]
    return len(pair[0]) == len(pair[1]) and all(map(torch.equal, *pair))


def exact(sizes: int) -> Iterator[dict[str, Any]]:
    """For each model how many of its steps had all bits and bytes as they should be."""
    for name, case in CASES.items():
        draw = random.Random(0)
        # torch.compile's front end notes each size for good, and a few dozen take as long as all the rest
        drawn = [draw.randint(case.least, case.most) for _ in range(sizes)]
        found = list(compared(case, list(dict.fromkeys(drawn))))
        yield {
            "what": "exact",
            "model": name,
            "budget": case.budget,
            "sizes": sizes,
            "shapes": len(found),
            "same_bits": sum(each.same_bits for each in found),
            "measured_is_predicted": sum(each.measured == each.predicted for each in found),
            "within_budget": sum(each.measured <= each.budget for each in found),
            "recomputing": sum(each.extra > 0 for each in found),
        }


def lengths(folder: Path) -> list[int]:
    """The lengths of a folder's sentences, in words and marks, none longer than the model."""
    column = next((at for name, at in COLUMNS.items() if folder.name == name), 0)
    lines = (folder / "train.tsv").read_text(encoding="utf-8").splitlines()[column == 0 :]
    sentences = [line.split("\t")[column] for line in lines]
    return [max(2, min(len(re.findall(r"\w+|[^\w\s]", each)), LONGEST)) for each in sentences]


def batches(all_lengths: list[int], steps: int) -> Iterator[Batch]:
    """Batches of sentences drawn from these lengths, each padded to its longest."""
    draw = random.Random(0)
    for _ in range(steps):
        drawn = [draw.choice(all_lengths) for _ in range(ROWS)]
        ids = torch.randint(0, VOCABULARY, (ROWS, max(drawn)))
        mask = (torch.arange(max(drawn)) < torch.tensor(drawn)[:, None]).long()
        yield {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def processor_seconds() -> float:
    """Of this process and of those that it waited for, as a compiler."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def trained(model: nn.Module, steps: list[Batch]) -> dict[str, Any]:
    """One pass over the batches: its seconds, and those that each length takes once it is known."""
    before = memory()
    taken: list[float] = []
    for batch in steps:
        start = processor_seconds()
        backward(model, batch)
        taken.append(processor_seconds() - start)
    total, grown = sum(taken), memory() - before
    known = {batch["input_ids"].shape[1]: batch for batch in steps}
    again: dict[int, float] = {}
    for length, batch in known.items():
        start = processor_seconds()
        for _ in range(3):
            backward(model, batch)
        again[length] = (processor_seconds() - start) / 3
    training = sum(again[batch["input_ids"].shape[1]] for batch in steps)
    return {
        "seconds": round(total, 2),
        "training": round(training, 2),
        "other": round(total - training, 2),
        "slowest_step": round(max(taken), 2),
        "memory_mib": round(grown, 1),
    }


def memory() -> float:
    """MiB that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def epoch(folder: Path, steps: int, label: str, *, compiled: bool) -> Iterator[dict[str, Any]]:
    """The same batches plainly, under a cap, and compiled for any length."""
    torch.compiler.reset()  # code of the folder before would do for this one
    torch.manual_seed(0)
    drawn = list(batches(lengths(folder), steps))
    shapes = sorted({batch["input_ids"].shape[1] for batch in drawn})
    model = gpt2(width=64, layers=2).train()
    longest = max(drawn, key=lambda batch: batch["input_ids"].shape[1])
    uncapped = lowtide.plan(model, kwargs=longest).peak
    about = {"what": "epoch", "label": label, "lengths": folder.name, "steps": steps, "shapes": len(shapes)}
    about |= {"torch": torch.__version__, "commit": commit()}
    backward(model, drawn[0])  # what torch sets up at its first step is no step's
    plain = trained(model, drawn)
    yield {**about, "way": "plain", **plain}
    budget = int(0.6 * uncapped)
    capped = lowtide.cap(copy.deepcopy(model), budget, max_plans=2 * len(shapes))
    yield {**about, "way": "lowtide", "budget": budget, "uncapped": uncapped, **trained(capped, drawn)}
    if compiled:
        twin = copy.deepcopy(model)
        twin.compile(dynamic=True)
        yield {**about, "way": "torch.compile(dynamic=True)", **trained(twin, drawn)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=("epoch", "exact"))
    parser.add_argument("folders", nargs="*", type=Path)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--sizes", type=int, default=200)
    parser.add_argument("--label", default="after")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--results", type=Path, default=RESULTS)
    asked = parser.parse_args()
    logging.getLogger("lowtide").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LOWTIDE_CACHE"] = os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        measure(asked)


def measure(asked: argparse.Namespace) -> None:
    """Print and keep a row for each result."""
    rows: list[Iterator[dict[str, Any]]] = (
        [exact(asked.sizes)]
        if asked.what == "exact"
        else [epoch(each, asked.steps, asked.label, compiled=asked.compiled) for each in asked.folders]
    )
    with asked.results.open("a") as file:
        for row in (row for found in rows for row in found):
            print(row, flush=True)
            file.write(json.dumps(row) + "\n")
            file.flush()


if __name__ == "__main__":
    main()
