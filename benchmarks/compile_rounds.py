"""How often the code of a compiled step is generated, and the CPU time of its set-up beside torch.compile's.

    python benchmarks/compile_rounds.py                     # all models, on the CPU; appends to results/
    python benchmarks/compile_rounds.py --only vit gpt2 --budgets 60% --idle

Each model is compiled by torch.compile and, for each budget, by Lowtide's executor "inductor", each in a
process of its own with empty caches (cold), and once more in a second process that finds them (warm). Seconds
are those of the processor, of the process and of the compilers that it starts, for the first forward and
backward: other work on the machine counts little. `rounds` counts the plans whose buffers were looked for,
`generated` the graphs whose code was generated: two for a step. With `--idle` no kernel is compiled, which
shows the rounds alone in a tenth of the time.

The models are tiny, with as many ops a layer as large ones. ConvNeXt and T5 are there to look at, not to tune
on.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import vision
from commit import commit
from setup_times import Made, forward, images, tokens

RESULTS = Path(__file__).parent / "results" / "compile_rounds.jsonl"
BUDGETS = ("70%", "45%")


class Loss(dict[str, torch.Tensor]):
    """The result of a model, as those of `transformers` give it."""

    @property
    def loss(self) -> torch.Tensor:
        return self["loss"]


class Dense(nn.Module):
    """A DenseNet of two blocks (Huang et al. 2016), with the loss of a classifier."""

    def __init__(self) -> None:
        super().__init__()
        stem = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True)]
        first = [vision.DenseBlock(16, 8, 6), nn.BatchNorm2d(64), nn.ReLU(inplace=True)]
        between = [nn.Conv2d(64, 32, 1, bias=False), nn.AvgPool2d(2), vision.DenseBlock(32, 8, 6)]
        head = [nn.BatchNorm2d(80), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        self.net = nn.Sequential(*stem, *first, *between, *head, nn.Linear(80, 10))

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> Loss:
        return Loss(loss=nn.functional.cross_entropy(self.net(pixel_values), labels))


def resnet() -> Made:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=8, hidden_sizes=[32, 64, 128], depths=[2, 2, 2])
    return ResNetForImageClassification(config), images(16, 64)


def swin() -> Made:
    from transformers import SwinConfig, SwinForImageClassification

    sizes: dict[str, Any] = {"embed_dim": 24, "num_heads": [1, 2], "depths": [2, 2]}
    config = SwinConfig(image_size=32, window_size=2, patch_size=2, **sizes)
    return SwinForImageClassification(config), images(16, 32)


def vit() -> Made:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128, "num_hidden_layers": 4}
    return ViTForImageClassification(ViTConfig(image_size=32, patch_size=8, **sizes)), images(16, 32)


def densenet() -> Made:
    return Dense(), images(16, 32)


def gpt2() -> Made:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=64, n_head=4, n_layer=4, vocab_size=512, n_positions=128, eos_token_id=0)
    return GPT2LMHeadModel(config), tokens(512, 8, 64)


def llama() -> Made:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 4}
    config = LlamaConfig(num_key_value_heads=2, vocab_size=512, max_position_embeddings=512, **sizes)
    return LlamaForCausalLM(config), tokens(512, 8, 64)


def convnext() -> Made:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    config = ConvNextConfig(hidden_sizes=[16, 32, 64, 128], depths=[1, 1, 3, 1])
    return ConvNextForImageClassification(config), images(16, 64)


def t5() -> Made:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
    config = T5Config(vocab_size=512, decoder_start_token_id=0, **sizes)
    return T5ForConditionalGeneration(config), tokens(512, 8, 64)


MODELS: dict[str, Callable[[], Made]] = {
    "resnet": resnet,
    "swin": swin,
    "vit": vit,
    "densenet": densenet,
    "gpt2": gpt2,
    "llama": llama,
    "convnext": convnext,
    "t5": t5,
}


def cpu_seconds() -> float:
    """Of this process and of the compilers that it has waited for."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


class Counted:
    """What is looked at on the way: drafts, generated code, plans."""

    def __init__(self) -> None:
        from torch._inductor.graph import GraphLowering

        from lowtide.run.inductor import attempt

        self.rounds: list[dict[str, int]] = []
        self.passes = self.drafts = 0
        lower, draft, lowered = GraphLowering.codegen, attempt.Attempt.draft, attempt.Attempt.stop_if_over

        def codegen(graph: Any) -> Any:
            self.passes += 1
            return lower(graph)

        def drafted(one: Any, half: Any) -> Any:
            before = self.passes
            try:
                return draft(one, half)
            finally:
                self.drafts += self.passes - before

        def looked(one: Any) -> None:
            try:
                lowered(one)
            finally:
                plan = one.result
                self.rounds.append(
                    {
                        "turn": one.turn,
                        "predicted": plan.timeline.peak,
                        "peak": plan.peak,
                        "budget": plan.budget,
                    }
                )

        GraphLowering.codegen = codegen  # type: ignore[method-assign]
        attempt.Attempt.draft = drafted  # type: ignore[method-assign]
        attempt.Attempt.stop_if_over = looked  # type: ignore[method-assign]

    @property
    def facts(self) -> dict[str, Any]:
        turns = {found["turn"]: found for found in self.rounds}
        misses = [round(found["peak"] / found["predicted"], 4) for found in turns.values()]
        return {"rounds": len(turns), "generated": self.passes - self.drafts, "above_prediction": misses}


def without_drafts() -> None:
    """Let each round compile what it has, and look at its text then."""
    from lowtide.run.inductor.attempt import Attempt

    Attempt.is_drafted = lambda *_: False  # type: ignore[method-assign]


def compiled(name: str, budget: str | None, folder: str, idle: bool, drafts: bool) -> dict[str, Any]:
    """The first step of a model in a new process: by torch.compile, or under a budget."""
    os.environ.update(LOWTIDE_CACHE=folder + "/lowtide", TORCHINDUCTOR_CACHE_DIR=folder + "/inductor")
    import torch._inductor.async_compile
    import torch._inductor.config

    import lowtide

    logging.getLogger("lowtide").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    torch._inductor.config.compile_threads = 1
    if idle:
        torch._inductor.async_compile.AsyncCompile.cpp_pybinding = lambda *_, **__: lambda *_: None
    counted = Counted()
    if not drafts:
        without_drafts()
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    start = cpu_seconds()
    if budget is None:
        step: Any = torch.compile(model)
    else:
        step = lowtide.cap(model, budget, executor="inductor", prices="roofline")
    try:
        loss = forward(step, batch)
        if not idle:
            loss.backward()
    except lowtide.BudgetTooSmall as error:
        return {"refused": error.smallest, "seconds": round(cpu_seconds() - start, 2), **counted.facts}
    return {"seconds": round(cpu_seconds() - start, 2), **counted.facts}


def rows(name: str, budgets: list[str], *, idle: bool) -> list[dict[str, Any]]:
    """A row for torch.compile and two for each budget: cold, and warm where kernels are compiled."""
    found = []
    ways = [(budget, by) for budget in budgets for by in ("lowtide", "without drafts")]
    for budget, by in ((None, "torch.compile"), *ways):
        row: dict[str, Any] = {"model": name, "budget": budget, "by": by}
        drafts = by == "lowtide"
        with tempfile.TemporaryDirectory() as folder:
            for state in ("cold", "warm")[: 1 if idle or by == "without drafts" else 2]:
                with multiprocessing.get_context("spawn").Pool(1) as pool:
                    row[state] = pool.apply(compiled, (name, budget, folder, idle, drafts))
        found.append({**row, "idle": idle, "torch": torch.__version__, "commit": commit()})
    return found


def line(row: dict[str, Any]) -> str:
    states = [f"{state} {row[state]['seconds']:7.1f} s" for state in ("cold", "warm") if state in row]
    cold = row["cold"]
    what = f"{cold['rounds']} rounds, {cold['generated']} graphs generated, {cold['above_prediction']}"
    return f"{row['model']:9} {row['by']:14} {row['budget'] or '':4} {' '.join(states)}  {what}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS), help="which models")
    parser.add_argument("--budgets", nargs="+", default=list(BUDGETS), help="shares of the uncapped peak")
    parser.add_argument("--idle", action="store_true", help="compile no kernel, and run none")
    parser.add_argument("--label", default="", help="a word for these rows, such as before or after")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the file of results; rows are appended")
    args = parser.parse_args(arguments)
    for name in args.only:
        for row in rows(name, args.budgets, idle=args.idle):
            print(line(row), flush=True)
            with args.out.open("a") as file:
                file.write(json.dumps({"label": args.label, **row}) + "\n")


if __name__ == "__main__":
    main()
