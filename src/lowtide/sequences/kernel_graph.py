"""Kernels that were launched once and are replayed as one: a CUDA graph.

The graphs of all scans on a stream share a pool of memory and a stream to be captured on: what one has freed
the next one uses, and the library's workspace, which belongs to the stream, is there once. They run one
after the other; scans on different streams, which may run at the same time, share nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, TypeAlias

import torch

from .._torch import private
from ..torch_state.random_state import generator_of

__all__ = ["Replay", "captured", "may_capture", "warm"]

Replay: TypeAlias = Callable[[], Any]


def may_capture(device: torch.device) -> bool:
    """Whether a graph can be captured there now: not while another one is."""
    return device.type == "cuda" and not torch.cuda.is_current_stream_capturing()


def captured(body: Callable[[], None], device: torch.device) -> Replay:
    """What a function launches, to be replayed; raises RuntimeError where it waits for the device."""
    graph = torch.cuda.CUDAGraph()
    pool = _keeper(device, _here(device)).pool()
    generator = generator_of(str(device))
    untouched = generator.clone_state()
    try:
        with _aside(device), _no_cached_casts():
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                body()
            finally:
                graph.capture_end()
    except BaseException:
        generator.graphsafe_set_state(untouched)  # the other one may wait for the end of a capture for ever
        _abandon(graph, pool, device)
        raise
    return graph.replay


_abandoned: list[torch.cuda.CUDAGraph] = []
"""Graphs that could not be captured: the allocator of pinned memory goes on to ask them, so they stay."""


def _abandon(graph: torch.cuda.CUDAGraph, pool: Any, device: torch.device) -> None:
    """Let the next capture use a pool of its own: one that could not end leaves its pool open for ever.

    On the device it can be closed; for pinned memory there is no way to.
    """
    number = torch.cuda.current_device() if device.index is None else device.index
    with suppress(RuntimeError):  # it was closed
        private("leave_pool")(number, pool)
    _abandoned.append(graph)
    _keeper.cache_clear()


def warm(body: Callable[[], None], device: torch.device) -> None:
    """Run a function where graphs are captured, so that libraries have set themselves up there."""
    with _aside(device):
        body()


@contextmanager
def _aside(device: torch.device) -> Iterator[None]:
    here, side = torch.cuda.current_stream(device), _stream(device, _here(device))
    side.wait_stream(here)
    with torch.cuda.stream(side):
        yield
    here.wait_stream(side)


@contextmanager
def _no_cached_casts() -> Iterator[None]:
    """A cast of a weight that autocast keeps would be gone when the graph is replayed."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def _here(device: torch.device) -> int:
    """The number of the present stream."""
    return torch.cuda.current_stream(device).cuda_stream


@cache
def _stream(device: torch.device, beside: int) -> torch.cuda.Stream:
    """The stream to capture on, for scans on a stream of that number."""
    return torch.cuda.Stream(device)


@cache
def _keeper(device: torch.device, beside: int) -> torch.cuda.CUDAGraph:
    """A graph that stays: while there is one, its pool of memory stays for the others."""
    graph = torch.cuda.CUDAGraph()
    number = torch.zeros((), device=device)
    with torch.cuda.stream(_stream(device, beside)):
        graph.capture_begin(capture_error_mode="thread_local")
        number.add_(1)
        graph.capture_end()
    return graph
