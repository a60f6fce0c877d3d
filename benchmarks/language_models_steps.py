"""The training steps of the language-model benchmark: models of `transformers` by their configs, no weights.

Each is a shape that people fine-tune, in bf16, with the loss inside: `model(input_ids=x, labels=x).loss`. The
8B one is frozen, with adapters (LoRA, Hu et al. 2021) on all of its linear layers, written out here. The tiny
versions have the same parts and run on a CPU within seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["SUBJECTS", "Subject"]

SEED = 0
RANK = 16


class Adapted(nn.Module):
    """A frozen linear layer and what is trained beside it: a product of two thin matrices."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer
        options: Any = {"device": layer.weight.device, "dtype": layer.weight.dtype}
        self.down = nn.Parameter(torch.randn(RANK, layer.in_features, **options) / layer.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(layer.out_features, RANK, **options))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + (x @ self.down.T) @ self.up.T  # type: ignore[no-any-return]


def with_adapters(model: nn.Module) -> nn.Module:
    """The model with all but its adapters frozen; the head has none."""
    model.requires_grad_(False)
    layers = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "lm_head"]
    for name, layer in layers:
        owner, _, child = name.rpartition(".")
        setattr(model.get_submodule(owner), child, Adapted(layer))
    return model


def llama(
    layers: int, width: int, hidden: int, heads: int, groups: int, vocabulary: int, *, tied: bool = True
) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=width // heads,
        max_position_embeddings=131072,
        rope_theta=500000.0,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config)


def qwen(layers: int, width: int, hidden: int, heads: int, groups: int, vocabulary: int) -> nn.Module:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
    )
    return Qwen2ForCausalLM(config)


def gpt2(layers: int, width: int, heads: int, vocabulary: int, length: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=vocabulary, n_embd=width, n_layer=layers, n_head=heads, n_positions=length
    )  # with its dropout of 0.1
    return GPT2LMHeadModel(config)


@dataclass(frozen=True)
class Subject:
    """A step: what to call it, the model at full size and tiny, and the rows and tokens of its batch.

    `settings` are the rows of its table: a tool, and for Lowtide a budget and what else is asked for.
    """

    title: str
    full: Callable[[], nn.Module]
    tiny: Callable[[], nn.Module]
    batch: tuple[int, int]
    settings: tuple[str, ...]

    def build(
        self, device: str, *, tiny: bool = False, length: int | None = None
    ) -> tuple[nn.Module, Tensor]:
        """The model, ready to be trained, and the tokens of a batch."""
        torch.manual_seed(SEED)
        rows, tokens = (2, 64) if tiny else self.batch
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32 if tiny else torch.bfloat16)
        try:
            with torch.device(device):
                model = (self.tiny if tiny else self.full)().train()
                ids = torch.randint(model.config.vocab_size, (rows, length or tokens))  # type: ignore[union-attr,operator]
        finally:
            torch.set_default_dtype(before)
        return model, ids


OTHERS = ("eager", "checkpoint", "compile", "compile+checkpoint")

SUBJECTS = {
    "llama-3b": Subject(
        "Llama 3.2 3B shapes, 2 x 8192 tokens",
        lambda: llama(28, 3072, 8192, 24, 8, 128256),
        lambda: llama(2, 64, 128, 4, 2, 512),
        (2, 8192),
        (
            *OTHERS,
            "lowtide:130GiB",
            "lowtide:80GiB",
            "lowtide:60GiB",
            "lowtide:45600MiB",
            "lowtide:min",
            "lowtide:45600MiB:split",
            "lowtide:30800MiB:split",
            "lowtide:min:split",
            "lowtide:30800MiB:split:step",
            "lowtide:23900MiB:split:step",
            "lowtide:min:split:step",
            "lowtide-inductor:60GiB",
            "lowtide-inductor:30800MiB:split",
        ),
    ),
    "qwen2-0.5b": Subject(
        "Qwen2 0.5B shapes, 4 x 4096 tokens",
        lambda: qwen(24, 896, 4864, 14, 2, 151936),
        lambda: qwen(2, 64, 128, 4, 2, 512),
        (4, 4096),
        (
            *OTHERS,
            "lowtide:130GiB",
            "lowtide:60%",
            "lowtide:min",
            "lowtide:20GiB:split",
            "lowtide:min:split",
            "lowtide:min:split:step",
        ),
    ),
    "gpt2-medium": Subject(
        "GPT-2 medium with dropout, 16 x 1024 tokens",
        lambda: gpt2(24, 1024, 16, 50257, 1024),
        lambda: gpt2(2, 64, 4, 512, 64),
        (16, 1024),
        (
            *OTHERS,
            "lowtide:130GiB",
            "lowtide:60%",
            "lowtide:min",
            "lowtide:12GiB:split",
            "lowtide:min:split",
            "lowtide:min:split:step",
        ),
    ),
    "llama-8b-lora": Subject(
        "Llama 3 8B shapes with LoRA, 1 x 8192 tokens",
        lambda: with_adapters(llama(32, 4096, 14336, 32, 8, 128256, tied=False)),
        lambda: with_adapters(llama(2, 64, 128, 4, 2, 512, tied=False)),
        (1, 8192),
        (
            *OTHERS,
            "lowtide:130GiB",
            "lowtide:60%",
            "lowtide:24GiB",
            "lowtide:24GiB:split",
            "lowtide:min:split",
        ),
    ),
}
