"""Seconds to the first step under a cap, stage by stage, with plain eager's first step beside them.

    python benchmarks/setup_times.py --label before                   # small models, on the CPU
    python benchmarks/setup_times.py --device cuda --only llama swin   # full size; appends to results/

Each model runs in a process of its own, which finds the compiled search and no price. The same process then
caps a second model of the same shapes for another budget: that one finds the prices, and nothing of torch to
import. A second process does the same again: it finds the prices and what was searched. Seconds on a CPU are
those of the processor, of one thread, so other work on the machine counts little; on a GPU they are the
wall's, between synchronisations.

Rows are written as they are made; models whose last row the file has of this label, commit and torch are left
out, so that a run that was stopped goes on.
"""

from __future__ import annotations

import argparse
import functools
import logging
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from commit import commit
from row_files import append, there

RESULTS = Path(__file__).parent / "results" / "setup_times.jsonl"
STAGES = ("dynamo", "aot", "rewrites", "prices", "search", "lowering", "first run")
BUDGETS = ("60%", "75%")
PROCESSES = (1, 2)

Batch = dict[str, torch.Tensor]
Made = tuple[nn.Module, Batch]


class Clock:
    """Seconds by stage; those of a stage inside of another count for the inner one alone."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self.stack = ["dynamo"]
        self.since = now()

    def turn(self) -> None:
        """Book the time since the last turn to the stage under way."""
        now = self.now()
        self.seconds[self.stack[-1]] += now - self.since
        self.since = now

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        self.turn()
        self.stack.append(name)
        try:
            yield
        finally:
            self.turn()
            self.stack.pop()


class Watch:
    """Lowtide's functions with a clock around them: what is called from inside of torch has no other sign."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.clock = Clock(now)

    def put_on(self) -> None:
        from lowtide.pipeline import eager_step, runnable_step, way_down
        from lowtide.prices import measured

        for owner, name, stage in (
            (eager_step, "through_aot", "aot"),
            (way_down, "capture_step", "rewrites"),
            (way_down, "price_step", "prices"),
            (measured, "_try_op", "prices"),
            (way_down, "plan_step", "search"),
            (way_down, "lower_step", "lowering"),
            (eager_step._Halves, "forward", "lowering"),
            (eager_step._Halves, "backward", "lowering"),
            (runnable_step.RunnableStep, "__call__", "first run"),
        ):
            setattr(owner, name, self.around(getattr(owner, name), stage))

    def around(self, function: Callable[..., Any], stage: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.clock.stage(stage):
                return function(*args, **kwargs)

        return timed

    def step(self, model: nn.Module, batch: Batch) -> dict[str, float]:
        """The seconds of a step, by stage and in all."""
        self.clock = Clock(self.clock.now)
        loss = forward(model, batch)
        with self.clock.stage("first run"):
            loss.backward()
        self.clock.turn()
        found = {name: round(seconds, 3) for name, seconds in self.clock.seconds.items()}
        return {**found, "total": round(sum(self.clock.seconds.values()), 3)}


def forward(model: nn.Module, batch: Batch) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).loss
    return loss


def tokens(vocabulary: int, batch: int, length: int) -> Batch:
    ids = torch.randint(0, vocabulary, (batch, length))
    return {"input_ids": ids, "labels": ids}


def images(batch: int, side: int) -> Batch:
    return {"pixel_values": torch.rand(batch, 3, side, side), "labels": torch.arange(batch) % 2}


def llama(full: bool) -> Made:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 3072, "intermediate_size": 8192, "num_attention_heads": 24} if full else {}
    small = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    config = LlamaConfig(
        num_hidden_layers=28,
        num_key_value_heads=8 if full else 2,
        vocab_size=128_256 if full else 512,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        **(sizes or small),
    )
    return LlamaForCausalLM(config), tokens(config.vocab_size, 2 if full else 8, 8192 if full else 64)


def gpt2(full: bool) -> Made:
    from transformers import GPT2Config, GPT2LMHeadModel

    small = {"n_embd": 64, "n_head": 4, "vocab_size": 512, "n_positions": 128}
    config = GPT2Config() if full else GPT2Config(**small)
    return GPT2LMHeadModel(config), tokens(config.vocab_size, 8, 1024 if full else 64)


def bert(full: bool) -> Made:
    from transformers import BertConfig, BertForMaskedLM

    small = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 512}
    config = BertConfig() if full else BertConfig(**small)
    return BertForMaskedLM(config), tokens(config.vocab_size, 32 if full else 8, 512 if full else 64)


def vit(full: bool) -> Made:
    from transformers import ViTConfig, ViTForImageClassification

    small = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128, "image_size": 32}
    config = ViTConfig() if full else ViTConfig(patch_size=8, **small)
    return ViTForImageClassification(config), images(128 if full else 16, 224 if full else 32)


def swin(full: bool) -> Made:
    from transformers import SwinConfig, SwinForImageClassification

    small = {"embed_dim": 24, "num_heads": [1, 2, 4, 8], "image_size": 64, "window_size": 2, "patch_size": 2}
    config = SwinConfig() if full else SwinConfig(**small)
    return SwinForImageClassification(config), images(128 if full else 16, 224 if full else 64)


def resnet50(full: bool) -> Made:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig() if full else ResNetConfig(embedding_size=8, hidden_sizes=[32, 64, 128, 256])
    return ResNetForImageClassification(config), images(96 if full else 16, 224 if full else 64)


MODELS = {"llama": llama, "gpt2": gpt2, "bert": bert, "vit": vit, "swin": swin, "resnet50": resnet50}
"""The steps, each made in full or tiny; the tiny ones have as many ops."""
IN_BF16 = ("llama",)


def made(name: str, device: str) -> Made:
    torch.manual_seed(0)
    with torch.device(device):
        model, batch = MODELS[name](device != "cpu")
    if device != "cpu" and name in IN_BF16:
        model = model.to(torch.bfloat16)
    return model, batch


def clock_of(device: str) -> Callable[[], float]:
    if device == "cpu":
        return time.process_time

    def now() -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    return now


def eager_seconds(name: str, device: str) -> float:
    """Plain eager's first step."""
    model, batch = made(name, device)
    now = clock_of(device)
    start = now()
    forward(model, batch).backward()
    return round(now() - start, 3)


def measured(name: str, device: str, prices: str, folder: str) -> list[dict[str, Any]]:
    """A row for the first cap of a process, and one for the second; `folder` is Lowtide's cache."""
    import lowtide
    from lowtide.solve.search.build import library

    logging.getLogger("lowtide").setLevel(logging.ERROR)
    if device == "cpu":
        torch.set_num_threads(1)
    library()  # built once on a machine
    os.environ["LOWTIDE_CACHE"] = folder
    eager = eager_seconds(name, device)
    watch = Watch(clock_of(device))
    watch.put_on()
    rows = []
    for cap, budget in enumerate(BUDGETS, 1):
        model, batch = made(name, device)
        capped = lowtide.cap(model, budget, prices=prices)
        row = {"model": name, "device": device, "prices": prices, "cap": cap, "budget": budget}
        row |= {"stages": watch.step(capped, batch), "eager": eager}
        plan = lowtide.plan_of(capped)
        assert plan is not None
        row |= {"ops": len(plan.graph.ops), "extra": plan.extra, "peak": plan.peak}
        rows.append({**row, "torch": torch.__version__, "commit": commit()})
        del model, capped, plan
    return rows


def line(row: dict[str, Any]) -> str:
    stages = " ".join(f"{name} {row['stages'][name]:6.2f}" for name in (*STAGES, "total"))
    which = f"process {row['process']}, cap {row['cap']}"
    return f"{row['model']:9} {row['ops']:5} ops, {which}: {stages}  eager {row['eager']:.2f}"


def rows_of(name: str, args: argparse.Namespace, folder: str) -> Iterator[dict[str, Any]]:
    """The rows of two processes with one cache; none finds what torch has imported or traced for another."""
    for process in PROCESSES:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            for row in pool.apply(measured, (name, args.device, args.prices, folder)):
                yield {**row, "process": process}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS), help="which models")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--prices", default="measured", choices=("measured", "roofline"))
    parser.add_argument("--label", default="", help="a word for these rows, such as before or after")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the file of results; rows are appended")
    args = parser.parse_args(arguments)
    facts = {"label": args.label, "prices": args.prices, "torch": torch.__version__, "commit": commit()}
    done = there(args.out, ("model", "process", "cap"), {**facts, "device": args.device})
    for name in args.only:
        if (name, PROCESSES[-1], len(BUDGETS)) in done:
            continue
        with tempfile.TemporaryDirectory() as folder:
            for row in rows_of(name, args, folder):
                print(line(row), flush=True)
                append({"label": args.label, **row}, args.out)


if __name__ == "__main__":
    main()
