"""Models that wrap others: which module inside of them holds a cap, and which cannot hold one."""

from __future__ import annotations

from typing import Any

import torch

from .._torch import private_of
from ..errors import LowtideError

__all__ = ["called_by", "refuse_wrappers", "trains_by_method"]


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
