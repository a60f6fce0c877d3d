"""The tools of the head-to-head: each gives, while its context lasts, a callable that computes the loss.

- `eager`: the model as it is.
- `checkpoint`: torch.utils.checkpoint around every block. The blocks are the members of the outermost lists
  of modules that have parts of their own; a convolution between blocks is none.
- `selective`: the same, with the outputs of matrix products, convolutions and attention kept. A ReLU may
  work in place on such an output, as U-Net's do: doing it twice changes nothing, so the check against
  that is off, and the gradients are compared anyway.
- `compile`: torch.compile with its `activation_memory_budget`.
- `lowtide-eager`, `lowtide-inductor`: lowtide.cap with a budget in bytes, "min", or all of the device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch import config
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import lowtide
from headtohead_results import is_size

Call = Callable[..., Tensor]
Budget = int | str

PACKETS = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "convolution",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)
"""What selective checkpointing keeps, as far as this version of torch has it."""


def blocks(module: nn.Module) -> list[nn.Module]:
    """The members of the outermost lists, where they consist of parts."""
    if isinstance(module, nn.Sequential | nn.ModuleList):
        members = [child for child in module.children() if any(True for _ in child.children())]
        if len(members) > 1:
            return members
    return [block for child in module.children() for block in blocks(child)]


@contextmanager
def checkpointed(model: nn.Module, **options: Any) -> Iterator[Call]:
    found = blocks(model)
    if not found:
        raise ValueError("the model has no blocks to checkpoint")
    for block in found:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, **options)
    try:
        yield model
    finally:
        for block in found:
            del block.forward


def kept_ops() -> list[Any]:
    packets = [getattr(torch.ops.aten, name, None) for name in PACKETS]
    return [packet.default for packet in packets if packet is not None]


def selective(model: nn.Module) -> Any:
    """A context: torch makes the two halves of it anew for every block."""
    contexts = functools.partial(
        create_selective_checkpoint_contexts, kept_ops(), allow_cache_entry_mutation=True
    )
    return checkpointed(model, context_fn=contexts)


@contextmanager
def compiled(model: nn.Module, budget: float) -> Iterator[Call]:
    torch._dynamo.reset()
    try:
        with config.patch(activation_memory_budget=budget):
            yield torch.compile(model)
    finally:
        torch._dynamo.reset()


@contextmanager
def capped(model: nn.Module, budget: Budget, *, executor: str) -> Iterator[Call]:
    lowtide.cap(model, budget, executor=executor)
    try:
        yield model
    finally:
        lowtide.uncap(model)
        torch._dynamo.reset()


@contextmanager
def plain(model: nn.Module) -> Iterator[Call]:
    yield model


def tool(name: str, model: nn.Module, setting: str, *, uncapped: int | None = None) -> Any:
    """The context of a tool at a setting; shares are of the `uncapped` peak in bytes."""
    if name == "compile":
        return compiled(model, float(setting))
    if name.startswith("lowtide-"):
        return capped(model, budget_of(setting, uncapped), executor=name.removeprefix("lowtide-"))
    return {"eager": plain, "checkpoint": checkpointed, "selective": selective}[name](model)


def budget_of(setting: str, uncapped: int | None) -> Budget:
    if setting == "min":
        return "min"
    if setting == "uncapped":
        return "100% of device"
    if is_size(setting):
        return int(setting.removesuffix("MiB")) << 20
    if uncapped is None:
        raise ValueError(f"there is no uncapped peak to take {setting} of")
    return uncapped * int(setting.rstrip("%")) // 100
