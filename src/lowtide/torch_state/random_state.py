"""Recomputed random ops: their state is saved before the first run and put back for each later one."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

__all__ = [
    "OwnGenerator",
    "generator_of",
    "keep_state",
    "look_at_state",
    "put_state",
    "recompute",
    "state_size",
    "take_state",
]


class OwnGenerator:
    """A generator that a step names itself."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def __repr__(self) -> str:
        """As an expression: torch writes the code of graphs that it stands in."""
        return f"OwnGenerator({str(self.generator.device)!r})"

    def stand_in(self) -> OwnGenerator:
        """Another one of the same device, which may be drawn from."""
        return OwnGenerator(torch.Generator(self.generator.device))


Source = str | OwnGenerator
"""Where an operator draws from: a device's generator, or one of its own."""


def generator_of(device: Source) -> torch.Generator:
    """The generator that operators on a device draw from, or the one that is named."""
    if isinstance(device, OwnGenerator):
        return device.generator
    where = torch.device(device)
    if where.type == "cuda":
        index = torch.cuda.current_device() if where.index is None else where.index
        return torch.cuda.default_generators[index]
    return torch.default_generator


def state_size(device: Source) -> int:
    """The bytes of a device's random state."""
    return generator_of(device).get_state().numel()


def take_state(device: Source) -> torch.Tensor:
    """The random state of a device, as a tensor on the host that counts as one of the step's own."""
    return keep_state(look_at_state(device))


def keep_state(state: torch.Tensor) -> torch.Tensor:
    """A copy of a random state that was looked at, which counts."""
    kept = torch.empty(state.numel(), dtype=torch.uint8)
    ctypes.memmove(kept.data_ptr(), state.data_ptr(), state.numel())  # no operator: nothing else is counted
    return kept


def look_at_state(device: Source) -> torch.Tensor:
    """The random state of a device for a moment: it does not count."""
    return generator_of(device).get_state()


def put_state(state: torch.Tensor, device: Source) -> None:
    """Let a device go on from a saved random state."""
    generator_of(device).set_state(state)


def recompute(
    state: torch.Tensor, device: Source, op: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """Run a random op from a saved state and leave the present state as it is."""
    generator = generator_of(device)
    present = generator.get_state()
    generator.set_state(state)
    try:
        return op(*args, **kwargs)
    finally:
        generator.set_state(present)
