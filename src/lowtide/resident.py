"""What else is on the device during a step: optimizer state, and on CUDA everything the allocator holds."""

from __future__ import annotations

import gc
import math
from typing import Any

import torch

from ._torch import private
from .allocator import rounded
from .errors import LowtideError
from .graph import Graph

__all__ = ["bucket_bytes", "fixed_bands", "optimizer_bytes"]

_NUMBER = 4
"""Bytes of one of the numbers in which DistributedDataParallel notes the parameters that were used."""

SIZES = (2, 3, 5, 7, 11, 13, 17, 19)
"""The sizes that tell the dimensions of a small parameter apart."""


def fixed_bands(graph: Graph, device: torch.device, optimizer: Any, *, present: bool) -> dict[str, int]:
    """Bytes that are there during the whole step and that no value of the graph stands for.

    `present` says that the device is here and holds the step's inputs already, so that what else it holds
    can be read from its allocator.
    """
    held, coming = optimizer_bytes(optimizer, device) if optimizer is not None else (0, 0)
    bands = {"optimizer": held + coming}
    if present and device.type == "cuda":
        gc.collect()  # tensors that only a cycle of objects holds may be gone before the step
        bands["other"] = max(torch.cuda.memory_allocated(device) - graph.given_bytes - held, 0)
    elif present:  # on CUDA they are among the others
        bands["DDP buckets"] = bucket_bytes()
    return {name: size for name, size in bands.items() if size}


def bucket_bytes() -> int:
    """The bytes that DistributedDataParallel holds beside a module that it calls.

    Copies of the gradients, and two numbers for each parameter that say whether it was used.
    """
    wrapper = private("active_ddp")()
    if wrapper is None:
        return 0
    trained = [parameter for parameter in wrapper.module.parameters() if parameter.requires_grad]
    return sum(p.numel() * p.element_size() + 2 * _NUMBER for p in trained)


def optimizer_bytes(optimizer: Any, device: torch.device) -> tuple[int, int]:
    """The bytes of an optimizer's state on a device: what is there, and what its first step will make."""
    held = coming = 0
    for group in optimizer.param_groups:
        made: dict[tuple[torch.dtype, int], dict[str, Any]] = {}
        for parameter in group["params"]:
            state = optimizer.state.get(parameter)
            if state:
                held += _state_bytes(state, device)
            elif parameter.requires_grad:
                kind = parameter.dtype, parameter.ndim
                if kind not in made:
                    made[kind] = _first_state(optimizer, group, *kind)
                coming += _scaled_bytes(made[kind], parameter, device)
    return held, coming


def _state_bytes(state: dict[str, Any], device: torch.device) -> int:
    tensors = [item for item in state.values() if isinstance(item, torch.Tensor)]
    return sum(rounded(t.untyped_storage().nbytes(), device) for t in tensors if t.device.type == device.type)


def _first_state(optimizer: Any, group: dict[str, Any], dtype: torch.dtype, ndim: int) -> dict[str, Any]:
    """What a first step makes for a small parameter of so many dimensions, each of another size.

    What it makes may depend on them: Adafactor keeps rows and columns of a matrix, Muon takes nothing else.
    """
    small = torch.nn.Parameter(torch.zeros(SIZES[: max(ndim, 1)], dtype=dtype))
    small.grad = torch.zeros_like(small)
    options = {key: value for key, value in group.items() if key != "params"}
    options |= {key: False for key in ("fused", "capturable") if key in options}
    trial = object.__new__(type(optimizer))
    trial.__dict__.update(optimizer.__dict__)
    trial.param_groups = [{**options, "params": [small]}]
    trial.state = type(optimizer.state)(dict)
    step = getattr(type(optimizer).step, "__wrapped__", type(optimizer).step)
    try:
        step(trial)
    except Exception as error:
        raise LowtideError(
            f"cannot tell the state of {type(optimizer).__name__} before its first step ({error}); "
            "take one step before capping, or leave optimizer= out and subtract it from the budget"
        ) from error
    return dict(trial.state[small])


def _scaled_bytes(state: dict[str, Any], parameter: torch.Tensor, device: torch.device) -> int:
    """The bytes of such a state for a whole parameter; single numbers stay on the host."""
    real = dict(zip(SIZES, parameter.shape or (1,), strict=False))
    tensors = [item for item in state.values() if isinstance(item, torch.Tensor)]
    whole = single = 0
    for tensor in tensors:
        if tensor.ndim:
            size = math.prod(real.get(length, length) for length in tensor.shape)
            whole += rounded(size * tensor.element_size(), device)
        else:
            single += tensor.untyped_storage().nbytes()
    return whole + (single if device.type == "cpu" else 0)
