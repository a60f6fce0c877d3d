"""Models that wrap others: which module inside of them holds a cap, and which cannot hold one."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch

from .._torch import private_of
from ..errors import LowtideError
from ..sharded.fsdp_groups import holds_sharded, is_sharded

__all__ = ["called_by", "refuse_sharded", "refuse_wrappers", "trains_by_method"]

_SHARD = "for block in model.layers: fully_shard(block), then fully_shard(model) and lowtide.cap(model, ...)"


def called_by(model: Any) -> Any:
    """The module that holds the cap: the one that DistributedDataParallel or Lightning's Fabric calls.

    What they do around it torch cannot capture: DDP prepares its buckets, a model of `fabric.setup` converts
    the batch, enters autocast and puts hooks on the outputs. Other models are given back as they are.
    """
    if type(model).__name__ == "_FabricModule":  # by its name: Lightning may not be installed
        model = private_of(model, "modules")["_forward_module"]
    return model.module if isinstance(model, torch.nn.parallel.DistributedDataParallel) else model


def refuse_wrappers(model: torch.nn.Module) -> None:
    """Refuse what cannot hold a cap: it would be lost, or end in an error at the first call."""
    if isinstance(model, torch.jit.ScriptModule):
        raise LowtideError("a model of torch.jit cannot be captured; cap the module that it was made from")
    if isinstance(model, torch.nn.DataParallel):
        raise LowtideError(
            "torch.nn.DataParallel copies the module to each GPU at every call, and a copy is not capped. "
            "Start one process for each GPU, with DistributedDataParallel(lowtide.cap(model, ...))"
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
    if trains_by_method(model):
        raise LowtideError(
            f"{type(model).__name__} is a LightningModule: its Trainer calls training_step, which goes past "
            "a cap on the module. Cap the step instead, as in lightning.Trainer(callbacks=[lowtide."
            'integrations.lightning.Cap("8GiB")]); in a loop of your own, cap the network inside of it, or a '
            "function that calls it"
        )


def trains_by_method(model: torch.nn.Module) -> bool:
    """Whether a module is a LightningModule that has a training step of its own."""
    own: Any = type(model)
    base: Any = next((kind for kind in own.__mro__ if kind.__name__ == "LightningModule"), None)
    return base is not None and own.training_step is not base.training_step


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
