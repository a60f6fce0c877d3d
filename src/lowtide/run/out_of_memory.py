"""A step that ran out of memory, although it was planned: another process took some, or a library did.

torch's error goes on to its user as it is, of the same class, with words of what was planned, what the device
had, and what of the model had changed by then. Of a step without gradients before it nothing has, but for the
statistics of BatchNorm: its gradients leave the backward when it is over. What cannot be taken back without a
copy, which would count in every step, is told: sums of gradients over several backward passes, statistics,
gradients that hooks or DistributedDataParallel await, parameters that were updated inside of the backward.

How far the step had come is the line of its generated code, and costs nothing until then. The frames of that
code are cleared: an error that somebody holds, as an `except` does that tries a smaller batch, holds no
activations but those that the operator was given.
"""

from __future__ import annotations

import contextlib
import traceback
from collections import Counter
from collections.abc import Generator, Iterator
from types import FrameType
from typing import Any

import torch

from ..devices.table import host_memory_left, total_memory
from ..plans.planned_step import Plan
from ..units import format_bytes
from .changes import CHANGES, FILE

__all__ = ["explain", "explained"]

_ON_HOST = ("can't allocate memory", "not enough memory")
"""What torch's allocator of the CPU says, in an error without a class of its own."""

_WORDS = {
    "statistics": "{} BatchNorm layers have updated their statistics",
    "written": "{} buffers or inputs were written to",
    "summed": "{} gradients were added to those of an earlier backward",
    "handed": "{} gradients were handed to the hooks, or to DistributedDataParallel, that await them",
    "updated": "{} parameters were updated by the optimizer",
}


def explain(error: RuntimeError, plan: Plan, half: str) -> None:
    """Add to an error of torch's, where it is of memory, what its user can do with."""
    if not _is_of_memory(error) or hasattr(error, "planned"):
        return
    error.planned = plan.peak  # type: ignore[attr-defined]  # said once
    device = _device_now(torch.device(plan.graph.device))
    changed = _changed(error)
    _let_go(error)
    budget = "" if plan.budget is None else f" under a budget of {format_bytes(plan.budget)}"
    error.args = (
        f"{error} The {half} of a step that was planned for a peak of {format_bytes(plan.peak)}{budget} ran "
        f"out of memory: {device}. {_state(changed, half, compiled=plan.compiled is not None)}",
    )


def explained(paused: Generator[Any, Any, Any], plan: Plan) -> Generator[Any, Any, Any]:
    """A backward that pauses, with its errors explained."""
    try:
        return (yield from paused)
    except RuntimeError as error:
        explain(error, plan, "backward")
        raise


def _is_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in _ON_HOST)


def _device_now(device: torch.device) -> str:
    if device.type != "cuda":
        total = total_memory(device) or 0
        return f"of the {format_bytes(total)} of this machine {format_bytes(host_memory_left())} are left"
    free, total = torch.cuda.mem_get_info(device)
    own = torch.cuda.memory_reserved(device)
    others = max(total - free - own, 0)
    return (
        f"of the {format_bytes(total)} of {device} {format_bytes(free)} are free; PyTorch holds "
        f"{format_bytes(own)} in this process, {format_bytes(torch.cuda.memory_allocated(device))} of it in "
        f"tensors; other processes and CUDA hold {format_bytes(others)}"
    )


def _frames(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    """The frames of generated code that an error came through, each with its line."""
    for frame, line in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_filename.startswith(FILE):
            yield frame, line


def _changed(error: BaseException) -> Counter[str]:
    """What lines before the one that failed have changed for good."""
    found: Counter[str] = Counter()
    for frame, failed in _frames(error):
        for line, what, number in frame.f_globals.get(CHANGES, ()):
            found[what] += number * (line < failed)
    return +found


def _let_go(error: BaseException) -> None:
    for frame, _ in _frames(error):
        with contextlib.suppress(RuntimeError):  # one that is still running is cleared by nobody
            frame.clear()


def _state(changed: Counter[str], half: str, *, compiled: bool) -> str:
    if compiled and half == "forward":
        return "Parameters and gradients are as they were before it; compiled, it may have updated buffers"
    if not changed:
        return f"Parameters, gradients and buffers are as they were before this {half}"
    told = "; ".join(_WORDS[what].format(number) for what, number in changed.items())
    then = ": optimizer.zero_grad() before the next step" if {"summed", "handed"} & changed.keys() else ""
    return f"Changed by then, and not taken back: {told}{then}. All else is as it was before this {half}"
