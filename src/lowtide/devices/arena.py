"""The arena of a CUDA device: a free segment of the caching allocator that all of a step's requests share.

It stays reserved as long as something lies in it, so later plans on the device find it, and what lies there,
as they are made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["has_arena", "lay_arena"]

_devices: set[int] = set()


def has_arena(device: torch.device) -> bool:
    """Whether an arena was laid on a device by this process."""
    return device.type == "cuda" and (device.index or 0) in _devices


def lay_arena(device: torch.device, size: int) -> bool:
    """Give back what is wholly free, and reserve that many bytes at once; False where they cannot be had."""
    import torch

    with torch.cuda.device(device):
        torch.cuda.empty_cache()
        if not size:
            return True
        try:
            torch.empty(size, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError:
            return False
    _devices.add(device.index or 0)
    return True
