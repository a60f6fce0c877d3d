"""Recomputed random ops: their state is saved before the first run and put back for each later one."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

__all__ = [
    "generator_of",
    "keep_state",
    "look_at_state",
    "put_state",
    "recompute",
    "state_size",
    "take_state",
]


def generator_of(device: str) -> torch.Generator:
    """The generator that operators on a device draw from."""
    where = torch.device(device)
    if where.type == "cuda":
        index = torch.cuda.current_device() if where.index is None else where.index
        return torch.cuda.default_generators[index]
    return torch.default_generator


def state_size(device: str) -> int:
    """The bytes of a device's random state."""
    return generator_of(device).get_state().numel()


def take_state(device: str) -> torch.Tensor:
    """The random state of a device, as a tensor on the host that counts as one of the step's own."""
    return keep_state(look_at_state(device))


def keep_state(state: torch.Tensor) -> torch.Tensor:
    """A copy of a random state that was looked at, which counts."""
    kept = torch.empty(state.numel(), dtype=torch.uint8)
    ctypes.memmove(kept.data_ptr(), state.data_ptr(), state.numel())  # no operator: nothing else is counted
    return kept


def look_at_state(device: str) -> torch.Tensor:
    """The random state of a device for a moment: it does not count."""
    return generator_of(device).get_state()


def put_state(state: torch.Tensor, device: str) -> None:
    """Let a device go on from a saved random state."""
    generator_of(device).set_state(state)


def recompute(state: torch.Tensor, device: str, op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a random op from a saved state and leave the present state as it is."""
    generator = generator_of(device)
    present = generator.get_state()
    generator.set_state(state)
    try:
        return op(*args, **kwargs)
    finally:
        generator.set_state(present)
