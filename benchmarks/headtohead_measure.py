"""What a training step takes and what comes out of it: peak, time, gradients.

Time: the steps run back to back, with an event after each on CUDA; the median counts, and the spread is
the distance between the quartiles. Where it is more than a twentieth of the median (something else used the
device), the steps are timed again, up to three times, and the calmest round counts.

`kernel_milliseconds` (CUDA) is what the kernels of one step take together, without the gaps between them: a
step of very many small kernels takes as long as its launches.

Peak: `max_memory_allocated` over the timed steps on CUDA, with gradients dropped before each; on the CPU the
live storages of one step (`lowtide.measure`).

Gradients: two outcomes are compared by the norm of the difference over the norm, of all gradients together
(single ones, such as a bias before a BatchNorm, are sums that cancel, and mostly rounding). Convolutions run
without TF32 for that step, as rounding grows a thousandfold through a deep network with BatchNorm at its
start; the compiled code stays the same.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import lowtide
from headtohead_tools import Call

WARM_UP = 3
ROUNDS = 3
CALM = 0.05
TOLERANCE = {torch.bfloat16: 0.1, torch.float32: 0.05}
"""Relative differences of gradients that rounding may make; a wrong dropout mask makes several times more."""


@dataclass(frozen=True)
class Outcome:
    """What a step gives; `drawn` is the random state between forward and backward."""

    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor | None]
    drawn: Tensor

    def kept(self) -> Outcome:
        """A copy on the host, which takes no memory of the device and which no later step changes."""
        gradients, buffers = (
            {name: on_host(part) for name, part in parts.items()} for parts in (self.gradients, self.buffers)
        )
        return Outcome(gradients, buffers, self.drawn)


class Stand:
    """A model with one batch on its device, to be stepped by any tool."""

    def __init__(self, model: nn.Module, batch: tuple[Tensor, ...]) -> None:
        self.model, self.batch = model, batch
        self.device = batch[0].device
        self.buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        self.random = any(isinstance(part, nn.Dropout) and part.p > 0 for part in model.modules())
        self.dtype = next(model.parameters()).dtype

    def clear(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None

    def step(self, call: Call) -> None:
        self.clear()
        call(*self.batch).backward()

    def finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def tidy(self) -> None:
        """Give back what is not in use, so that other processes find the device's memory free."""
        self.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def outcome(self, call: Call) -> Outcome:
        """One step from the first buffers and a fixed seed."""
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                buffer.copy_(self.buffers[name])
        self.clear()
        torch.manual_seed(1)
        with exact_convolutions():
            loss = call(*self.batch)
            drawn = torch.cuda.get_rng_state() if self.device.type == "cuda" else torch.get_rng_state()
            loss.backward()
        gradients = {name: parameter.grad for name, parameter in self.model.named_parameters()}
        self.clear()
        return Outcome(gradients, dict(self.model.named_buffers()), drawn)

    def compare(self, found: Outcome, reference: Outcome) -> dict[str, Any]:
        """The words of a row: "wrong" beyond the tolerance, "n/a" where other random numbers were drawn."""
        tolerance = TOLERANCE[self.dtype]
        gap = self.difference(found.gradients, reference.gradients)
        word = "ok" if gap <= tolerance else "wrong"
        if word == "wrong" and not torch.equal(found.drawn, reference.drawn):
            word = "n/a"
        number = round(gap, 6) if math.isfinite(gap) else None
        row = {"gradients": word, "gradient_difference": number, "tolerance": tolerance}
        if found.buffers:
            off = self.difference(found.buffers, reference.buffers)
            row["buffers"] = "ok" if off <= tolerance else "wrong"
        return row

    def difference(self, found: dict[str, Tensor | None], reference: dict[str, Tensor | None]) -> float:
        """The norm of the difference over the norm; a tensor that only one side has is infinitely far."""
        gap = whole = 0.0
        for name, right in reference.items():
            left = found[name]
            if left is None or right is None:
                gap += 0.0 if left is right else math.inf
                continue
            left, right = (part.detach().to(self.device).double() for part in (left, right))
            gap += (left - right).square().sum().item()
            whole += right.square().sum().item()
        share = math.sqrt(gap / whole if whole else gap) if math.isfinite(gap) else math.inf
        return share if math.isfinite(share) else math.inf


def on_host(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().to("cpu", copy=True)


@contextmanager
def exact_convolutions() -> Iterator[None]:
    allowed = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = allowed


def measured(stand: Stand, call: Call, steps: int) -> dict[str, Any]:
    """Peak, memory before the step, reserved memory (CUDA), median milliseconds and their spread."""
    for _ in range(WARM_UP):
        stand.step(call)
    stand.clear()
    stand.finish()
    return on_cuda(stand, call, steps) if stand.device.type == "cuda" else on_cpu(stand, call, steps)


def on_cuda(stand: Stand, call: Call, steps: int) -> dict[str, Any]:
    baseline = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    times = calm(lambda: cuda_times(stand, call, steps))
    peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return {"peak": peak, "baseline": baseline, "reserved": reserved, **times, **kernels(stand, call)}


def kernels(stand: Stand, call: Call) -> dict[str, Any]:
    """The time of one step's kernels alone, and how many there are."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        stand.step(call)
        stand.finish()
    ran = [kind for kind in found.key_averages() if kind.self_device_time_total]
    microseconds = sum(kind.self_device_time_total for kind in ran)
    return {"kernel_milliseconds": round(microseconds / 1e3, 3), "kernels": sum(kind.count for kind in ran)}


def cuda_times(stand: Stand, call: Call, steps: int) -> list[float]:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    events[0].record()
    for event in events[1:]:
        stand.step(call)
        event.record()
    stand.finish()
    return [start.elapsed_time(end) for start, end in pairwise(events)]


def on_cpu(stand: Stand, call: Call, steps: int) -> dict[str, Any]:
    held = [*stand.model.parameters(), *stand.model.buffers(), *stand.batch]
    peak = lowtide.measure(lambda: stand.step(call), device="cpu", resident=held).peak
    stand.clear()
    times = calm(lambda: cpu_times(stand, call, steps))
    return {"peak": peak, "baseline": sum(part.numel() * part.element_size() for part in held), **times}


def cpu_times(stand: Stand, call: Call, steps: int) -> list[float]:
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        stand.step(call)
        times.append(1e3 * (time.perf_counter() - start))
    return times


def calm(clock: Callable[[], list[float]]) -> dict[str, float]:
    """The median of the calmest of a few rounds; the first one that is calm enough ends them."""
    rounds: list[tuple[float, float]] = []
    while len(rounds) < ROUNDS:
        times = clock()
        rounds.append((spread(times), statistics.median(times)))
        if rounds[-1][0] <= CALM * rounds[-1][1]:
            break
    calmest = min(rounds, key=lambda found: found[0] / found[1])
    return {"milliseconds": round(calmest[1], 3), "spread": round(calmest[0], 3)}


def spread(times: list[float]) -> float:
    if len(times) < 2:
        return 0.0
    first, _, last = statistics.quantiles(times, n=4)
    return last - first
