"""What a CUDA device is given before a plan's first step, so that the step's requests leave few holes.

An *arena* is a free segment of the caching allocator that all of the step's requests share. It stays reserved
as long as something lies in it, so later plans on the device find it, and what lies there, as they are made.
State that an optimizer is to make has its room beside it (`aside`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .aside import Hole, plugs_for, spare_for

if TYPE_CHECKING:
    import torch

__all__ = ["has_run", "lay_arena", "let_state_in", "sets_aside", "state_is_in"]


@dataclass
class _Room:
    """Room for state on a device; `plugs` are there while the optimizer makes it."""

    state: Sequence[int]
    blocks: list[torch.Tensor]
    holes: frozenset[Hole]
    plugs: list[torch.Tensor] = field(default_factory=list)


_rooms: dict[int, _Room] = {}
_devices: set[int] = set()


def has_run(device: torch.device) -> bool:
    """Whether a device was made ready for an earlier plan of this process."""
    return device.type == "cuda" and (device.index or 0) in _devices


def lay_arena(device: torch.device, size: int, state: Sequence[int] = ()) -> bool:
    """Give back what is wholly free, set room aside, and reserve an arena; False where that cannot be had."""
    import torch

    index = device.index or 0
    with torch.cuda.device(device):
        _devices.add(index)
        torch.cuda.empty_cache()
        try:
            if room := _blocks([each for each in state if each], index):
                _blocks(spare_for(state), index)
                _rooms[index] = _Room(state, room, frozenset(_holes(index)))
            _blocks([size] if size else [], index)
        except torch.OutOfMemoryError:
            return False
    return True


def sets_aside() -> bool:
    """Whether there is room for state that has not come yet."""
    return bool(_rooms)


def let_state_in() -> None:
    """An optimizer steps: what it makes to stay comes to lie in the room that was set aside."""
    import torch

    for index, room in _rooms.items():
        with suppress(torch.OutOfMemoryError):  # a hole that went to somebody else meanwhile
            plugs = _blocks(plugs_for(room.state, _holes(index)), index)
            room.plugs = [plug for plug in plugs if (plug.nbytes, plug.data_ptr()) not in room.holes]
            del plugs
        room.blocks.clear()


def state_is_in() -> None:
    """Let go of all room, and of what plugs holes meanwhile."""
    _rooms.clear()


def _blocks(sizes: Sequence[int], index: int) -> list[torch.Tensor]:
    import torch

    return [torch.empty(size, dtype=torch.uint8, device=f"cuda:{index}") for size in sizes]


def _holes(index: int) -> list[Hole]:
    import torch

    return [
        (block["size"], block["address"])
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == index and segment["segment_type"] == "large"
        for block in segment["blocks"]
        if block["state"] == "inactive"
    ]
