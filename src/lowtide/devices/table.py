"""What is known of devices: memory, bandwidth and arithmetic rates, for planning where the device is absent.

Rates are what large kernels reach in practice, about 80 % of the vendors' figures; they only have to be
right relative to each other. `docs/choosing-a-budget.md` says how to plan with measured prices instead.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import LowtideError

if TYPE_CHECKING:
    import torch  # the table itself is read before torch is

__all__ = ["DEVICES", "NODE", "Device", "describe", "find_device", "host_memory_left", "total_memory"]


@dataclass(frozen=True, slots=True)
class Device:
    """A device by its datasheet: bytes of memory, bytes per second, and operations per second by dtype.

    `link` is what goes to the other devices of its node per second, and `network` to other nodes, one way:
    of PCIe 4 and of 100 Gb/s where nothing else is said.
    """

    name: str
    type: str
    memory: int
    bandwidth: float
    half: float
    single: float
    launch: float = 4e-6
    link: float = 2.5e10
    network: float = 1e10

    def rate(self, dtype: torch.dtype) -> float:
        """Multiply-adds count as two operations."""
        return self.half if str(dtype) in ("torch.bfloat16", "torch.float16") else self.single


_GIB = 2**30

NODE = 8
"""Devices of one node, each with a network card of its own."""

DEVICES: dict[str, Device] = {
    device.name.lower(): device
    for device in (
        Device("H200", "cuda", 140 * _GIB, 4.3e12, 7.9e14, 3.5e14, link=3.6e11, network=4e10),
        Device("H100", "cuda", 79 * _GIB, 2.9e12, 7.6e14, 3.4e14, link=3.6e11, network=4e10),
        Device("A100", "cuda", 79 * _GIB, 1.7e12, 2.6e14, 1.2e14, link=2.4e11, network=2e10),
        Device("A100-40GB", "cuda", 39 * _GIB, 1.3e12, 2.6e14, 1.2e14, link=2.4e11, network=2e10),
        Device("V100", "cuda", 31 * _GIB, 7.8e11, 9.5e13, 1.4e13, link=1.2e11),
        Device("L40S", "cuda", 44 * _GIB, 7.2e11, 2.9e14, 1.4e14),
        Device("L4", "cuda", 22 * _GIB, 2.5e11, 9.5e13, 4.7e13),
        Device("A10G", "cuda", 22 * _GIB, 5.0e11, 5.6e13, 2.8e13),
        Device("T4", "cuda", 15 * _GIB, 2.5e11, 4.0e13, 7.0e12, link=1.2e10),
        Device("RTX 4090", "cuda", 23 * _GIB, 8.5e11, 1.3e14, 6.6e13),
        Device("RTX 3090", "cuda", 23 * _GIB, 7.8e11, 6.0e13, 3.0e13),
        Device("cpu", "cpu", 0, 2.0e10, 5.0e10, 1.0e11, launch=3e-6),
    )
}


def find_device(name: str) -> Device:
    """The device of that name in the table; raises with the known names otherwise.

    A maker's name has more words, as in "NVIDIA A100-SXM4-40GB": one may say that this has less memory.
    """
    words = _words(name)
    found = [device for device in DEVICES.values() if set(_words(device.name)) <= set(words)]
    if not found:
        known = ", ".join(device.name for device in DEVICES.values())
        raise LowtideError(
            f"device {name!r} is not in the table of devices to plan for that are not here: {known}. For one "
            "that is here, leave it out: a step is planned for the device that its tensors are on"
        )
    device = max(found, key=lambda each: len(each.name))
    sizes = [int(word[:-2]) for word in words if re.fullmatch(r"[0-9]+gb", word)]
    for size in sizes:
        if size * _GIB < 0.9 * device.memory:
            return replace(device, name=f"{device.name}-{size}GB", memory=(size - 1) * _GIB)
    return device


def _words(name: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", name.lower())


def describe(device: torch.device) -> str:
    """The name of a device that is here."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def total_memory(device: torch.device) -> int:
    """The memory of a device that is here, in bytes."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def host_memory_left(listed: Path = Path("/proc/meminfo")) -> int:
    """Bytes that the host can still give: those that are free and, on Linux, caches that give way."""
    left = re.search(r"^MemAvailable: +([0-9]+) kB$", listed.read_text(), re.M) if listed.exists() else None
    if left is not None:
        return int(left[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
