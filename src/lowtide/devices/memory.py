"""The memory of the device that a step is planned for: all of it, what is free, how its allocator stands.

A device that is here is asked. One that is not, a GPU of the table by its name, has the memory that the table
says. What a graph alone says of its device is a name: "cpu" or "cuda:0" in a file may be any machine's.
Importing this imports no torch, so that a graph file is planned without it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import LowtideError
from ..plans.graph import Graph
from .allocator import free_blocks
from .table import find_device, host_memory_left, total_memory

if TYPE_CHECKING:
    import torch

__all__ = ["DeviceMemory", "cuda_memory", "memory_by_name", "memory_of"]


@dataclass(frozen=True)
class DeviceMemory:
    """What is known of a device's memory, in bytes; None where nothing is.

    `free` asks for what a step could have now. `blocks` are the free blocks of a caching allocator, such as
    CUDA's, whose rules are replayed for every plan; a device without one has None.
    """

    name: str = "cpu"
    total: int | None = None
    free: Callable[[], int] | None = None
    blocks: tuple[int, ...] | None = None


def memory_of(graph: Graph, target: str | None) -> DeviceMemory:
    """The memory for a captured step: that of a named GPU that is absent, else of the device that is here."""
    if target is not None and find_device(target).type == "cuda":
        return memory_by_name(target)
    import torch

    device = torch.device(graph.device)
    if device.type == "cuda":
        return cuda_memory(device)
    if device.type == "cpu":
        return DeviceMemory("cpu", total_memory(device), lambda: graph.given_bytes + host_memory_left())
    return DeviceMemory(graph.device)


def cuda_memory(device: torch.device) -> DeviceMemory:
    """The memory of a CUDA device that is here; a step can have what is free and what torch holds already."""

    def free() -> int:
        import torch

        left, _ = torch.cuda.mem_get_info(device)
        return left + torch.cuda.memory_reserved(device)

    return DeviceMemory(str(device), total_memory(device), free, tuple(free_blocks(device)))


def memory_by_name(name: str) -> DeviceMemory:
    """The memory of a device of which only the name is known; its allocator starts with nothing free."""
    if name.partition(":")[0] == "cuda":
        return DeviceMemory(name, blocks=())
    try:
        known = find_device(name)
    except LowtideError:
        return DeviceMemory(name)
    return DeviceMemory(known.name, known.memory, blocks=()) if known.type == "cuda" else DeviceMemory(name)
