"""What a unit must find as it was when it ran first: the random state and autocast."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from ..torch_state.autocast_state import State, present_state
from ..torch_state.random_state import keep_state, look_at_state, put_state, state_size, take_state

__all__ = ["RandomState", "Surroundings", "devices_of"]

RandomState = list[torch.Tensor]


def devices_of(leaves: Iterable[Any]) -> list[str]:
    """The devices of some tensors, and the CPU."""
    found = {str(leaf.device) for leaf in leaves if isinstance(leaf, torch.Tensor)}
    return sorted({"cpu"} | {device for device in found if device.startswith("cuda")})


class Surroundings:
    """The devices whose random numbers a cell may draw, and autocast as the forward found it.

    `outside` is the autocast that units are recomputed in the midst of: that of the backward.
    """

    def __init__(self, devices: list[str]) -> None:
        self.devices = devices
        kinds = sorted({device.partition(":")[0] for device in devices})
        self.autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds
        ]
        self.caches = torch.is_autocast_cache_enabled()
        self.outside: State = ()

    @property
    def signature(self) -> tuple[Any, ...]:
        return (*self.autocast, self.caches)

    @property
    def random_size(self) -> int:
        """The bytes of a random state."""
        return sum(state_size(device) for device in self.devices)

    def random(self) -> RandomState:
        """The random state of now, to be kept."""
        return [take_state(device) for device in self.devices]

    def keep(self, states: RandomState) -> RandomState:
        """Random states that were looked at, to be kept."""
        return [keep_state(state) for state in states]

    def look(self) -> RandomState:
        """The random state of now, for a moment."""
        return [look_at_state(device) for device in self.devices]

    def go_on_from(self, state: RandomState) -> None:
        """Put a random state back."""
        for part, device in zip(state, self.devices, strict=True):
            put_state(part, device)

    def differs(self, state: RandomState) -> bool:
        """Whether random numbers were drawn since a state was taken."""
        return any(_bytes(old) != _bytes(new) for old, new in zip(state, self.look(), strict=True))

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """Run units once more: autocast as it was, and afterwards the random state of now."""
        present, self.outside = self.look(), present_state()
        with ExitStack() as stack:
            for kind, enabled, dtype in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype, enabled=enabled, cache_enabled=self.caches))
            try:
                yield
            finally:
                self.go_on_from(present)


def _bytes(state: torch.Tensor) -> bytes:
    return ctypes.string_at(state.data_ptr(), state.numel())  # no operator: nothing is counted
