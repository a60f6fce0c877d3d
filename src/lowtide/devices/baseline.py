"""What else is on the device during a step: optimizer state, and on CUDA everything the allocator holds."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from .._torch import inner_tensors, private
from ..errors import LowtideError
from ..plans.graph import Graph
from .allocator import rounded
from .arena import state_is_in
from .optimizers import SIZES, each_optimizer, first_state, levels, state_bytes

__all__ = ["State", "bucket_bytes", "fixed_bands", "optimizer_bytes", "states"]

_NUMBER = 4
"""Bytes of one of the numbers in which DistributedDataParallel notes the parameters that were used."""


class State(NamedTuple):
    """The bytes of an optimizer's state on a device: what is there, and what its first step will make."""

    optimizer: Any
    held: int
    coming: int


def fixed_bands(
    graph: Graph, device: torch.device, optimizers: Sequence[State], *, present: bool, in_flight: int = 0
) -> dict[str, int]:
    """Bytes that are there during the whole step and that no value of the graph stands for.

    `present` says that the device is here and holds the step's inputs already, so that what else it holds
    can be read from its allocator; what calls in flight hold of that has a band of its own.
    """
    held = sum(state.held for state in optimizers)
    bands = {"optimizer": held + sum(state.coming for state in optimizers)}
    if present and device.type == "cuda":
        state_is_in()
        gc.collect()  # tensors that only a cycle of objects holds may be gone before the step
        bands["other"] = max(torch.cuda.memory_allocated(device) - graph.given_bytes - held - in_flight, 0)
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


def states(announced: Any, others: Iterable[Any], device: torch.device) -> list[State]:
    """The state of the optimizers that were announced, and of others as far as it is there."""
    found: list[State] = []
    for *outer, innermost in map(levels, each_optimizer(announced)):
        found += [State(level, state_bytes(level, device), 0) for level in outer]
        found.append(State(innermost, state_bytes(innermost, device), _coming_bytes(innermost, device)))
    known = {id(state.optimizer) for state in found}
    return found + [State(one, state_bytes(one, device), 0) for one in others if id(one) not in known]


def optimizer_bytes(optimizer: Any, device: torch.device) -> tuple[int, int]:
    """The bytes of an optimizer's state, and of those that it wraps: what is there, and what is to come."""
    found = states(optimizer, (), device)
    return sum(state.held for state in found), sum(state.coming for state in found)


def _coming_bytes(optimizer: Any, device: torch.device) -> int:
    """What a first step makes for the parameters that have no state yet."""
    coming = 0
    states = getattr(optimizer, "state", {})
    for group in optimizer.param_groups:
        made: dict[tuple[torch.dtype, int], dict[str, Any]] = {}
        for parameter in group["params"]:
            if parameter.requires_grad and not states.get(parameter):
                kind = parameter.dtype, parameter.ndim
                if kind not in made:
                    made[kind] = _tried(optimizer, group, *kind)
                coming += _scaled_bytes(made[kind], parameter, device, on_device=_counts_on_device(group))
    return coming


def _tried(optimizer: Any, group: dict[str, Any], dtype: torch.dtype, ndim: int) -> dict[str, Any]:
    """What a first step makes; nothing for one that has stepped and cannot be tried, as LBFGS."""
    try:
        return first_state(optimizer, group, dtype, ndim)
    except LowtideError:
        if getattr(optimizer, "state", None):
            return {}
        raise


def _counts_on_device(group: dict[str, Any]) -> bool:
    """Whether single numbers, such as a count of steps, are where the parameter is, not on the host."""
    return bool(group.get("fused") or group.get("capturable"))


def _scaled_bytes(
    state: dict[str, Any], parameter: torch.Tensor, device: torch.device, *, on_device: bool
) -> int:
    """The bytes of such a state for a whole parameter."""
    inner = list(inner_tensors(parameter).values())
    local = inner[0] if len(inner) == 1 else parameter  # of a DTensor, this rank's part
    real = dict(zip(SIZES, local.shape or (1,), strict=False))
    total = 0
    for tensor in (item for item in state.values() if isinstance(item, torch.Tensor)):
        if tensor.ndim or on_device or device.type == "cpu":
            size = math.prod(real.get(length, length) for length in tensor.shape)
            total += rounded(size * tensor.element_size(), device)
    return total
