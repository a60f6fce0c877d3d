"""The main job on an embedded default: train a small language model, uncapped and capped, and compare.

    lowtide demo

A character-level transformer learns from the Python manual's help topics, which ship with Python. It is
trained twice from the same weights on the same batches: as it is, and with its activations capped at 40 % of
what they take. Everything runs on the CPU; the plan is written as an HTML report.
"""

from __future__ import annotations

import copy
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..console.progress import bar, waiting
from ..entry.api import cap, plan, plan_of
from ..evidence.watched_step import watch
from ..measuring.measurement import measure
from ..planner.frontiers import frontier
from ..plans.planned_step import Plan
from ..report import page as _page  # noqa: F401  # it lets plans write themselves
from ..report.text import text
from ..units import format_bytes

__all__ = ["demonstrate"]

CONTEXT, BATCH, WIDTH, LAYERS, HEADS = 128, 32, 128, 6, 4


class Block(nn.Module):
    """A pre-norm transformer block with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.proj(y.transpose(1, 2).reshape(batch, length, width)))
        x = x + self.drop(self.down(functional.gelu(self.up(self.norm2(x)))))
        return x


class LanguageModel(nn.Module):
    """A small GPT over characters that gives its loss."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocabulary)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        logits = self.head(self.norm(self.blocks(x)))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def corpus() -> Tensor:
    """The help topics of Python itself, as character codes."""
    from pydoc_data.topics import topics

    letters = "".join(topics[name] for name in sorted(topics))
    codes = {letter: index for index, letter in enumerate(sorted(set(letters)))}
    return torch.tensor([codes[letter] for letter in letters])


def batches(data: Tensor, steps: int) -> list[tuple[Tensor, Tensor]]:
    """Random windows and the same windows one character later."""
    starts = torch.randint(
        len(data) - CONTEXT - 1, (steps, BATCH), generator=torch.Generator().manual_seed(1)
    )
    windows = data[starts[..., None] + torch.arange(CONTEXT + 1)]
    return [(window[:, :-1].contiguous(), window[:, 1:].contiguous()) for window in windows]


class Run:
    """A model in training: its optimizer, and the losses and seconds of its steps."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def step(self, batch: tuple[Tensor, Tensor]) -> None:
        torch.manual_seed(len(self.losses))
        start = time.perf_counter()
        loss = self.model(*batch)
        loss.backward()
        self.seconds.append(time.perf_counter() - start)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())

    @property
    def state(self) -> list[Tensor]:
        """What the optimizer keeps."""
        return [tensor for each in self.optimizer.state.values() for tensor in each.values()]

    def peak(self, batch: tuple[Tensor, Tensor]) -> int:
        """The measured peak of a step, with the optimizer's state."""
        return measure(lambda: gradients(self.model, batch), resident=self.state).peak


def train(runs: Sequence[Run], data: list[tuple[Tensor, Tensor]]) -> None:
    """Both models on the same batches, step by step in turn, so that noise falls on both."""
    with bar("training") as progress:
        for index, batch in enumerate(data, 1):
            for run in runs:
                run.step(batch)
            losses = ", ".join(f"{run.losses[-1]:.4f}" for run in runs)
            progress(index / len(data), f"step {index}, loss uncapped and capped {losses}")


def gradients(model: nn.Module, batch: tuple[Tensor, Tensor]) -> list[Tensor]:
    """The gradients of one step from a fixed random state; the model's own stay empty."""
    torch.manual_seed(3)
    model(*batch).backward()
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    return found


def budget_for(vanilla: Plan, share: float) -> int:
    """A cap that leaves activations and gradients a share of what they take uncapped."""
    given = vanilla.graph.given_bytes + sum(vanilla.graph.fixed.values())
    return int(given + share * (vanilla.peak - given))


def say(message: str) -> None:
    """Print at once: what is known is seen while the rest runs."""
    print(message, flush=True)


def demonstrate(*, steps: int, share: float, out: Path) -> bool:
    """Run the demonstration; whether everything held."""
    torch.set_num_threads(max(1, (os.cpu_count() or 2) // 2))  # the other half keeps the machine usable
    torch.manual_seed(0)
    text_codes = corpus()
    data = batches(text_codes, steps)
    plain = LanguageModel(int(text_codes.max()) + 1)
    capped = copy.deepcopy(plain)
    size = sum(parameter.numel() for parameter in plain.parameters())
    say(f"A {LAYERS}-layer transformer of {size} parameters on {len(text_codes)} characters, on the CPU.")

    first, second = Run(plain), Run(capped)
    with waiting("planning without running anything"):
        budget = budget_for(plan(plain, *data[0], optimizer=first.optimizer), share)
    cap(capped, budget, optimizer=second.optimizer)
    with waiting("one step uncapped and capped"):
        identical = all(map(torch.equal, gradients(plain, data[0]), gradients(capped, data[0])))
    train((first, second), data)
    uncapped_peak, measured_peak = (run.peak(data[0]) for run in (first, second))
    made = plan_of(capped)
    assert made is not None
    same_losses = first.losses == second.losses

    say("\nstep   uncapped     capped")
    for index in sorted({0, *range(4, len(data), 5), len(data) - 1}):
        say(f"{index + 1:4}   {first.losses[index]:8.4f}   {second.losses[index]:8.4f}")
    say("")
    say(text(made))
    out.mkdir(parents=True, exist_ok=True)
    seen = watch(lambda: gradients(capped, data[0]), made, resident=second.state)
    report = made.report(out / "report.html", frontier=frontier(made, points=20), measured=seen)
    slower = median(second.seconds) / median(first.seconds) - 1
    say("")
    say(f"peak uncapped        {format_bytes(uncapped_peak):>12}   (plain PyTorch, measured)")
    say(f"cap                  {format_bytes(budget):>12}   ({share:.0%} of the activation peak)")
    say(f"predicted peak       {format_bytes(made.peak):>12}   ({made.peak} bytes)")
    say(f"measured peak        {format_bytes(measured_peak):>12}   ({measured_peak} bytes)")
    say(f"extra time           {slower:>+12.0%}   (predicted {made.extra:+.0%})")
    say(f"gradients identical: {'yes' if identical else 'NO'}")
    say(f"losses identical:    {'yes' if same_losses else 'NO'}")
    say(f"report:              {report}")
    return identical and same_losses and measured_peak == made.peak <= budget


if __name__ == "__main__":
    from .main import main

    sys.exit(main(["demo", *sys.argv[1:]]))
