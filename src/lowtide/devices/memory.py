"""The memory of the device that a step is planned for: all of it, what is free, how its allocator stands.

A device that is here is asked. One that is not, a GPU of the table by its name, has the memory that the table
says. What a graph alone says of its device is a name: "cpu" or "cuda:0" in a file may be any machine's.
Importing this imports no torch, so that a graph file is planned without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..errors import LowtideError
from ..plans.graph import Graph
from .allocator_settings import AllocatorSettings, settings_of_environment
from .arena import has_run
from .caching_allocator import Segment
from .table import find_device, host_memory_left, total_memory

if TYPE_CHECKING:
    import torch

__all__ = ["DeviceMemory", "cuda_memory", "memory_by_name", "memory_of", "segments_of"]

_DEFAULT_POOL = (0, 0)


@dataclass(frozen=True)
class DeviceMemory:
    """What is known of a device's memory, in bytes; None where nothing is.

    `free` asks for what a step could have now. `blocks` are the free blocks of a caching allocator, such as
    CUDA's, whose rules are replayed for every plan; a device without one has None. `segments` are all that it
    holds, free or not, and `settings` what the user has set of it. Where a step makes other requests than its
    graph says, as compiled code does, nothing `replays` them. With `has_run` steps of an earlier plan have.
    """

    name: str = "cpu"
    total: int | None = None
    free: Callable[[], int] | None = None
    blocks: tuple[int, ...] | None = None
    segments: tuple[Segment, ...] = ()
    settings: AllocatorSettings = field(default_factory=AllocatorSettings)
    replays: bool = True
    has_run: bool = False

    @property
    def says_reserved(self) -> bool:
        """Whether it can be told what a step makes the device reserve."""
        return self.blocks is not None and self.settings.native and self.replays


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

    import torch

    stream = torch.cuda.current_stream(device).cuda_stream
    segments = segments_of(torch.cuda.memory_snapshot(), device.index or 0, stream)
    large = (block for segment in segments if not segment.small for block in segment.blocks)
    blocks = tuple(size for size, is_free in large if is_free)
    return DeviceMemory(
        str(device),
        total_memory(device),
        free,
        blocks,
        segments,
        settings_of_environment(),
        has_run=has_run(device),
    )


def segments_of(snapshot: Iterable[dict[str, Any]], index: int, stream: int) -> tuple[Segment, ...]:
    """The segments of a device; what is kept for other streams or private pools is not free."""
    return tuple(
        Segment(
            segment["address"],
            tuple(
                (block["size"], block["state"] == "inactive" and _serves(segment, stream))
                for block in segment["blocks"]
            ),
            segment["segment_type"] == "small",
            segment.get("is_expandable", False),
        )
        for segment in snapshot
        if segment["device"] == index
    )


def _serves(segment: dict[str, Any], stream: int) -> bool:
    pool = tuple(segment.get("segment_pool_id", _DEFAULT_POOL))
    return pool == _DEFAULT_POOL and segment["stream"] == stream


def memory_by_name(name: str) -> DeviceMemory:
    """The memory of a device of which only the name is known; its allocator starts with nothing free."""
    if name.partition(":")[0] == "cuda":
        return DeviceMemory(name, blocks=(), settings=settings_of_environment())
    try:
        known = find_device(name)
    except LowtideError:
        return DeviceMemory(name)
    if known.type != "cuda":
        return DeviceMemory(name)
    return DeviceMemory(known.name, known.memory, blocks=(), settings=settings_of_environment())
