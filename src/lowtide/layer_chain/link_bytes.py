"""The bytes of one link of an `nn.Sequential`, measured.

Each link runs by itself: once forward without saving, and four times forward and backward, recomputed or not,
its input held by others or not. A made-up node before it takes its gradient, one after it gives it one, so
that nothing is held which the neighbours in a chain would not hold. Bytes are those of live storages on the
CPU and the allocator's on CUDA. Gradients of parameters count too, and start from none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import nn

from .._torch import private_of, storage_key
from ..devices.allocator import rounded
from ..measuring.tracker import live_storages
from ..measuring.trial import _MadeUpLoss
from .profile import Link

__all__ = ["measure_link", "run_layers", "storage_bytes"]


def measure_link(
    link: Link,
    layers: Sequence[nn.Module],
    sample: torch.Tensor,
    *,
    leaf: bool,
    last: bool,
    held: set[int],
    fresh: Callable[[], None],
) -> tuple[Link, torch.Tensor]:
    """The link with its bytes filled in, and its output.

    `sample` is the input; `leaf` says that its gradient stays, as that of a batch does, and `last` that the
    caller holds the output. `held` are the storages of parameters and buffers, which do not count as saved.
    `fresh` sets the gradients of parameters to what they are before the backward of this link.
    """
    meter = _meter(sample.device)
    with meter, torch.autograd.graph.saved_tensors_hooks(lambda _: None, _never):
        start = _start(sample, leaf)
        meter.begin()
        output = run_layers(layers, start)
    measured = {**vars(link), "out": storage_bytes(output), "forward": meter.peak, "saving": meter.peak}
    if output.requires_grad:
        found = {}
        # Each needs a run of its own: what autograd frees when depends on who else holds a tensor.
        for recomputed, free in product((True, False), (True, False)):
            fresh()
            how = _How(
                recomputed, free, copies=recomputed and link.changes_buffers, hold=last and not recomputed
            )
            found[recomputed, free] = _Saving(layers, sample, leaf, held, how).found
        measured |= found[True, False]
        measured["backward_free"] = found[True, True]["backward"]
        measured["first_extra"] = found[False, False]["extra"]
        measured["first_backward"] = found[False, False]["backward"]
        measured["first_backward_free"] = found[False, True]["backward"]
    return Link(**measured), output.detach().requires_grad_(output.requires_grad)


@dataclass(frozen=True)
class _How:
    """How a link is run and reversed.

    With `recomputed` saved tensors are let go of when they are asked for, as torch.utils.checkpoint does with
    what it recomputed. With `free` the input counts, and nobody but the link holds it. With `copies` buffers
    are left alone, with `hold` the output is held to the end.
    """

    recomputed: bool
    free: bool
    copies: bool
    hold: bool


class _Saving:
    """One run of a link that saves, and its backward; `found` are the bytes by the fields of `Link`."""

    def __init__(
        self, layers: Sequence[nn.Module], sample: torch.Tensor, leaf: bool, held: set[int], how: _How
    ) -> None:
        self.meter = _meter(sample.device)
        self.how = how
        self.saved: dict[int, int] = {}
        self.remade: dict[int, torch.Tensor] = {}
        self.until_saved = self.after = 0
        self.waiting = -1
        with self.meter:
            self.meter.begin()
            ends, forward = self.run(layers, sample, leaf)
            backward, gradients = self.meter.peak, self.meter.now
        self.found = {
            "saving": forward,
            "until_saved": self.until_saved,
            "extra": sum(size for key, size in self.saved.items() if key not in held and key not in ends),
            "saves_input": ends[0] in self.saved,
            "saves_output": ends[1] in self.saved,
            "waiting": max(self.waiting, 0),
            "backward": backward,
            "gradients": gradients,
        }

    def run(
        self, layers: Sequence[nn.Module], sample: torch.Tensor, leaf: bool
    ) -> tuple[tuple[int, int], int]:
        """Forward and backward; gives the storages of input and output, and the most of the forward."""
        start = _start(sample, leaf, self.how.free)
        with torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack):
            output = run_layers(layers, start, recomputed=self.how.copies)
        ends = (storage_key(start), storage_key(output))
        del start
        forward = self.meter.peak
        end = _MadeUpLoss.apply(output)
        output = output.detach() if self.how.hold else None
        self.after = self.meter.now
        self.meter.reset()
        torch.autograd.backward(end, torch.empty_like(end))
        return ends, forward

    def pack(self, tensor: torch.Tensor) -> Any:
        self.saved[storage_key(tensor)] = storage_bytes(tensor)
        # At least 1, since 0 says that nothing is saved.
        self.until_saved = max(self.meter.peak, 1)
        if not self.how.recomputed:
            return tensor.detach()
        self.remade[len(self.remade)] = tensor.detach()
        return len(self.remade) - 1

    def unpack(self, packed: Any) -> torch.Tensor:
        if self.waiting < 0:
            self.waiting = self.meter.now - self.after
        return self.remade.pop(packed) if self.how.recomputed else packed  # type: ignore[no-any-return]


def run_layers(layers: Sequence[nn.Module], value: Any, *, recomputed: bool = False) -> Any:
    """The layers one after the other; nothing between them is held. Recomputed, they leave buffers alone."""
    for layer in layers:
        with _copied_buffers(layer) if recomputed else nullcontext():
            value = layer(value)
    return value


@contextmanager
def _copied_buffers(layer: nn.Module) -> Iterator[None]:
    """Let a layer that trains change copies of its buffers."""
    owners = [owner for owner in layer.modules() if owner.training]
    places = [
        (owner, name) for owner in owners for name, b in private_of(owner, "buffers").items() if b is not None
    ]
    kept = [private_of(owner, "buffers")[name] for owner, name in places]
    try:
        for (owner, name), buffer in zip(places, kept, strict=True):
            private_of(owner, "buffers")[name] = buffer.clone()  # type: ignore[union-attr]
        yield
    finally:
        for (owner, name), buffer in zip(places, kept, strict=True):
            private_of(owner, "buffers")[name] = buffer


def storage_bytes(tensor: torch.Tensor) -> int:
    """The bytes of the storage behind a tensor, as its device's allocator rounds them."""
    return rounded(tensor.untyped_storage().nbytes(), tensor.device)


def _never(_: Any) -> Any:
    raise AssertionError("a run that saves nothing has no backward")


def _start(sample: torch.Tensor, leaf: bool, free: bool = False) -> torch.Tensor:
    """The input of a link, with a node before it that lets go of its gradient, as the link before would.

    With `free` it is a copy that nobody else holds.
    """
    if leaf or not sample.requires_grad:
        return (sample.clone() if free else sample).detach().requires_grad_(sample.requires_grad)
    # A custom function needs an input that requires a gradient for its backward to be called; this one has no
    # bytes.
    token = sample.new_empty(0).requires_grad_()
    return _Before.apply(token, sample.detach(), free)  # type: ignore[no-any-return]


class _Before(torch.autograd.Function):
    """Stands for the links before: hands an input on, takes its gradient and holds no bytes."""

    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, sample: torch.Tensor, free: bool) -> torch.Tensor:
        return sample.clone() if free else sample.view_as(sample)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        return None, None, None


def _meter(device: torch.device) -> Any:
    return _CudaMeter(device) if device.type == "cuda" else _CpuMeter()


class _CpuMeter:
    """Bytes of live storages that were made since `begin`."""

    def __init__(self) -> None:
        self.tracker = live_storages()

    def __enter__(self) -> None:
        self.tracker.mode.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.tracker.mode.__exit__(*error)

    def begin(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.tracker.made_peak = self.tracker.made

    @property
    def now(self) -> int:
        return self.tracker.made

    @property
    def peak(self) -> int:
        return self.tracker.made_peak


class _CudaMeter:
    """Bytes that the CUDA allocator handed out since `begin`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.base = 0

    def __enter__(self) -> None:
        self.begin()

    def __exit__(self, *error: Any) -> None:
        pass

    def begin(self) -> None:
        self.base = torch.cuda.memory_allocated(self.device)
        self.reset()

    def reset(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    @property
    def now(self) -> int:
        return int(torch.cuda.memory_allocated(self.device)) - self.base

    @property
    def peak(self) -> int:
        return int(torch.cuda.max_memory_allocated(self.device)) - self.base
