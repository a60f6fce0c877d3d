"""Models that cannot hold a cap: it would be lost, or end in an error at the first call."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import torch

from ..distributed.fsdp_groups import holds_sharded, is_sharded
from ..errors import LowtideError

__all__ = ["refuse_sharded", "refuse_wrappers"]

_SHARD = "for block in model.layers: fully_shard(block), then fully_shard(model) and lowtide.cap(model, ...)"


def refuse_wrappers(model: torch.nn.Module) -> None:
    """Refuse what cannot hold a cap, with the way that works."""
    if isinstance(model, torch.jit.ScriptModule):
        raise LowtideError("a model of torch.jit cannot be captured; cap the module that it was made from")
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        raise LowtideError(
            "cap the module and wrap it then, as in DistributedDataParallel(lowtide.cap(model, ...)): what "
            "DDP does around the module cannot be captured"
        )
    if _is_of_deepspeed(model):
        raise LowtideError(
            "an engine of DeepSpeed runs its own backward and gathers parameters in its own hooks: a cap "
            "cannot see what it takes. Use DeepSpeed's activation checkpointing with it; or shard the model "
            f"with torch's own fully_shard, which can be capped: {_SHARD}"
        )
    if any(map(_is_fsdp1, model.modules())):
        raise LowtideError(
            "FullyShardedDataParallel (FSDP1) flattens the parameters of a model, and what it does in its "
            f"hooks cannot be captured. Its successor, fully_shard (FSDP2), can be capped: {_SHARD}"
        )
    if holds_sharded(model) and not is_sharded(model):
        raise LowtideError(_not_the_root(model))


def refuse_sharded(modules: Iterable[torch.nn.Module]) -> None:
    """Refuse to plan a sharded model as one graph."""
    if any(map(holds_sharded, modules)):
        raise LowtideError(
            "a model that is sharded by fully_shard is not one graph: lowtide.cap plans its units one by "
            "one, before its first step, and lowtide.plan_of(model) shows what it found. Plan the model "
            "before it is sharded to see one device alone"
        )


def _not_the_root(model: torch.nn.Module) -> str:
    """What to say of a model that is not sharded itself, with sharded ones inside."""
    inside = [name for name, part in model.named_modules() if is_sharded(part)]
    roots = [name for name in inside if not any(name.startswith(f"{other}.") for other in inside)]
    if len(roots) == 1:
        return (
            f"the sharded model is {roots[0]!r} inside of this {type(model).__name__}: cap that one, as in "
            f"lowtide.cap(model.{roots[0]}, ...)"
        )
    return (
        "parts of this model are sharded by fully_shard and the model itself is not, so that each of them "
        f"is a root of its own. Shard the model, too, and cap it then: {_SHARD}"
    )


def _is_of_deepspeed(model: torch.nn.Module) -> bool:
    return any(kind.__module__.partition(".")[0] == "deepspeed" for kind in type(model).__mro__)


def _is_fsdp1(module: torch.nn.Module) -> bool:
    home = sys.modules.get("torch.distributed.fsdp")  # a model of it has it loaded
    return home is not None and isinstance(module, home.FullyShardedDataParallel)
