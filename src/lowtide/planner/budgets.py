"""What a budget comes to in bytes: the one place that says so, for every entry and every device.

The budget is the whole peak of the step on its device, as the user would read it off the allocator.

- Bytes are themselves; the device must have them, where it is known what it has.
- A share, "60%", is of the step's own uncapped peak, whatever the device has: of the bytes that it allocates,
  since what is reserved for them differs from loop to loop. A share of all or more is the uncapped step, with
  what that reserves. Where layers may keep sketches, it is the peak of the step without any.
- A share of the device, "90% of device", is of all of its memory: a GPU's, or the host's on the CPU.
- "free" is what the allocator holds, on the CPU what the step is given, plus what is free on the device.
- "min" has no bytes of its own: it asks for the smallest peak that can be found.
- "knee" is the peak of one of the step's own plans: `under_budget.settled` makes bytes of it, for a graph.
"""

from __future__ import annotations

from ..devices.memory import DeviceMemory
from ..errors import BudgetError
from ..units import Budget, format_bytes

__all__ = ["resolve"]

_INSTEAD = 'Write bytes, as in "24GiB", or a share of the uncapped peak, as in "50%".'


def resolve(asked: Budget, uncapped: int, device: DeviceMemory) -> int | None:
    """The bytes of a budget for a step with that uncapped peak; None asks for the smallest peak."""
    if asked.word == "min":
        return None
    if asked.word == "free":
        return _free(asked, device)
    if asked.is_share_of_peak:
        return max(asked.part(uncapped), asked.at_least)
    if asked.is_knee:
        raise BudgetError(f"budget {asked} has no size here, where no plans are at hand. {_INSTEAD}")
    size = asked.part(_total(asked, device)) if asked.is_share_of_device else asked.bytes
    assert size is not None
    if device.total is not None and size > device.total:
        raise BudgetError(
            f"budget {asked} is more than the device {device.name} has ({format_bytes(device.total)}). "
            f'Try budget="{device.total}" or less, or "90% of device".'
        )
    return size


def _free(asked: Budget, device: DeviceMemory) -> int:
    if device.free is None:
        raise BudgetError(
            f"budget {asked} needs the device at hand, and {device.name} is not: it is known where the step "
            f"runs. {_INSTEAD}"
        )
    return device.free()


def _total(asked: Budget, device: DeviceMemory) -> int:
    if device.total is None:
        raise BudgetError(
            f"budget {asked} has no size here: how much memory the device {device.name} has is known where "
            f"the step runs. {_INSTEAD}"
        )
    return device.total
