"""Prices of ops on the device itself: each is run on made-up inputs, and remembered in the cache folder.

A distinct combination of operator, shapes, dtypes, strides and arguments is measured once. A measured op also
tells how its outputs really lie in memory, which a fake tensor can only guess. Neither the model nor its
buffers nor the random state is touched.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from .._torch import private
from ..capture.fx_nodes import is_item
from ..capture.kernel_outputs import Outputs, lazily, lazy, may_hold, outputs_of
from ..capture.lift import Lifted
from ..capture.module_hooks import calls_hooks
from ..capture.op_signature import signature
from ..capture.rewrites.accumulate import is_accumulation
from ..capture.rewrites.collectives import is_collective, is_wait
from ..capture.rewrites.handing import is_handing
from ..capture.rewrites.own_generators import with_others
from ..capture.rewrites.stepping import is_update
from ..devices.allocator import rounded
from ..devices.table import describe, find_device
from ..measuring.tracker import live_storages
from ..plans.graph import Graph, Op, Value
from .price_cache import Price, PriceList
from .roofline import describe_known, roofline_seconds

__all__ = ["Kernels", "Workspaces", "collective_seconds", "is_convolution", "measured_prices"]


def measured_prices(lifted: Lifted, device: torch.device, *, channels_last: bool) -> Lifted:
    """The same graph with the seconds, workspaces and outputs that its ops have on the device."""
    known = PriceList.load(device)
    found: dict[str, Price] = {}
    guessed = 0
    speed = _bandwidth(known, device) if lifted.traffic else 1.0
    for op in lifted.graph.ops:
        node = lifted.node_of[op.name]
        # A fused loop does not exist as an operator that could be run: it is priced by the bytes it moves.
        if op.name in lifted.traffic:
            found[op.name] = Price(lifted.traffic[op.name] / speed, 0, None)
            continue
        cost = _price(known, node, device, channels_last=channels_last and is_convolution(node))
        if cost.seconds is None:
            # Ranks measure their collectives together (ranks/agreement.py).
            guessed += not (_is_autograds(node) or is_collective(node))
            cost = Price(roofline_seconds(node, find_device(describe_known(device))), 0, None)
        found[op.name] = cost
    known.save()
    where = f"measured on {describe(device)}" + (f", {guessed} ops by roofline" if guessed else "")
    return replace(lifted, graph=_apply(lifted, found, device).replace(prices=where))


class Workspaces:
    """What convolutions take for themselves while they run, by their layout; measured as prices are."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.known = device, PriceList.load(device)

    def __call__(self, node: fx.Node, *, channels_last: bool) -> int:
        """The bytes that a convolution takes."""
        found = _price(self.known, node, self.device, channels_last=channels_last)
        self.known.save()
        return found.workspace


class Kernels:
    """What the kernels of a device return for made-up inputs, measured as prices are."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.known = device, PriceList.load(device)

    def __call__(self, node: fx.Node) -> Outputs | None:
        """How the outputs of an op lie in memory; None for one that would not run alone."""
        return _price(self.known, node, self.device, channels_last=False).outputs

    def learn(self, facts: dict[str, Outputs]) -> None:
        """Take up what was seen of ops, by signature, where nothing was known of them."""
        for key, outputs in facts.items():
            price = self.known[key] if key in self.known else Price(None, 0, None)
            if price.outputs is None:
                self.known[key] = replace(price, outputs=outputs)

    def save(self) -> None:
        """Remember what is new."""
        self.known.save()


def collective_seconds(node: fx.Node, device: torch.device) -> float:
    """What a collective takes, on made-up inputs; every rank of its group must ask for it at the same time.

    It runs as often on each of them, however long that takes; in a thread of its own, since the one that
    runs collectives on the host takes over the state of torch's tracing, and waits for Python then.
    """
    with _untouched(device), ThreadPoolExecutor(1) as thread:
        return thread.submit(_run_together, node, device).result()


@torch.no_grad()
def _run_together(node: fx.Node, device: torch.device) -> float:
    made = {parent: _made_up(parent) for parent in node.all_input_nodes}
    args, kwargs = fx.map_arg((node.args, node.kwargs), made.__getitem__)
    seconds = []
    for _ in range(1 + _REPEATS):
        _synchronize(device)
        start = time.perf_counter()
        node.target(*args, **kwargs)  # type: ignore[operator]
        _synchronize(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])  # the first waits for the slowest to come


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def is_convolution(node: fx.Node) -> bool:
    """Whether a node is a convolution or the backward of one: their kernels depend on the layout."""
    packet = getattr(node.target, "overloadpacket", None)
    return packet in (torch.ops.aten.convolution, torch.ops.aten.convolution_backward)


def _price(known: PriceList, node: fx.Node, device: torch.device, *, channels_last: bool) -> Price:
    """The price of an op, remembered; not where there was no memory to run it, for there may be next time."""
    key = signature(node) + (" channels last" if channels_last else "")
    if key in known.read and not may_hold(known[key].outputs, node.meta.get("val")):
        known.distrust(key)
    if key not in known:
        try:
            with _untouched(device):
                known[key] = _try_op(node, device, channels_last=channels_last)
        except torch.OutOfMemoryError:
            return Price(None, 0, None)
    return known[key]


def _bandwidth(known: PriceList, device: torch.device) -> float:
    """What a copy moves per second, both ways: the speed of a loop."""
    size = 2**28 if device.type == "cuda" else 2**25  # more than a cache holds
    key = f"a copy of {size} bytes"
    if key not in known:
        with _untouched(device):
            source = torch.zeros(size, dtype=torch.uint8, device=device)
            known[key] = _clock_for(device)(source.clone, device, [source])
    return 2 * size / (known[key].seconds or 1.0)


def _apply(lifted: Lifted, found: dict[str, Price], device: torch.device) -> Graph:
    """The graph with measured seconds and workspace, and output sizes where the real ones differ."""
    sizes: dict[str, int] = {}
    ops: list[Op] = []
    for op in lifted.graph.ops:
        cost = found[op.name]
        unread = op.workspace
        if cost.outputs is not None:
            written = _written(lifted, op, cost.outputs, device)
            # What the kernel allocates and nobody reads lives only while it runs: workspace.
            unread = _new_bytes(cost.outputs, device) - sum(written.values())
            sizes.update(written)
        ops.append(replace(op, seconds=cost.seconds or 0.0, workspace=max(unread, 0) + cost.workspace))
    values = tuple(_resized(value, sizes) for value in lifted.graph.values)
    return lifted.graph.replace(ops=tuple(ops), values=values)


def _new_bytes(outputs: Outputs, device: torch.device) -> int:
    """What an op allocates for its outputs; one that looks at an input, as that of `copy_`, costs nothing."""
    return sum(rounded(output.new, device) for output in outputs if output is not None)


def _resized(value: Value, sizes: dict[str, int]) -> Value:
    return replace(value, bytes=sizes[value.name]) if value.name in sizes else value


def _written(lifted: Lifted, op: Op, outputs: Outputs, device: torch.device) -> dict[str, int]:
    """The real bytes of each value that an op writes."""
    sizes: dict[str, int] = {}
    for name in op.writes:
        root = lifted.root_of[name]
        index = 0 if root is lifted.node_of[op.name] else int(root.args[1])  # type: ignore[arg-type]
        output = outputs[index] if index < len(outputs) else None
        if output is not None and output.shares is None:
            sizes[name] = rounded(output.bytes, device)
    return sizes


def _is_autograds(node: fx.Node) -> bool:
    """Whether a node does autograd's, an optimizer's or a hook's work with gradients: it never runs alone."""
    return is_accumulation(node) or is_handing(node) or is_update(node) or calls_hooks(node)


def _try_op(node: fx.Node, device: torch.device, *, channels_last: bool = False) -> Price:
    """Run an op on made-up inputs; an op that refuses them is priced by the roofline instead."""
    # Alone a collective has nobody to meet.
    if _is_autograds(node) or is_collective(node) or is_wait(node):
        return Price(None, 0, None)
    try:
        made: dict[fx.Node, Any] = {}
        for parent in node.all_input_nodes:
            made[parent] = _with_channels_last(_made_up(parent)) if channels_last else _made_up(parent)
        args, kwargs = fx.map_arg((node.args, node.kwargs), made.__getitem__)
        args = with_others(args)
        reads = [tensor for item in made.values() for tensor in private("tree_leaves")(item)]
        reads = [tensor for tensor in reads if isinstance(tensor, torch.Tensor)]
        return _clock_for(device)(lambda: node.target(*args, **kwargs), device, reads)  # type: ignore[operator]
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, ValueError, NotImplementedError, IndexError, KeyError):
        return Price(None, 0, None)


def _made_up(node: fx.Node) -> Any:
    """Inputs for a trial run; what only an op itself can make (seeds, indices) comes from running that op."""
    value = node.meta["val"]
    # Zeros would not do: the indices of a max pooling, or the seed of an attention, must be valid ones.
    source: Any = node.args[0] if is_item(node) else node
    numbers = isinstance(value, torch.Tensor) and not value.dtype.is_floating_point
    if is_item(node) and numbers and not _is_autograds(source):
        args, kwargs = fx.map_arg((source.args, source.kwargs), _made_up)
        return source.target(*args, **kwargs)[node.args[1]]
    if isinstance(value, list | tuple):
        return type(value)(_made_up_tensor(item) for item in value)
    return _made_up_tensor(value)


def _with_channels_last(made: Any) -> Any:
    if not isinstance(made, torch.Tensor) or made.ndim != 4:
        return made
    return made.contiguous(memory_format=torch.channels_last)


def _made_up_tensor(fake: Any) -> Any:
    """Numbers in (0, 1), which every operator takes, and zeros, which index everything."""
    if not isinstance(fake, torch.Tensor):
        return fake
    extent = fake.untyped_storage().nbytes() // fake.element_size()
    flat = torch.zeros(extent, dtype=fake.dtype, device=fake.device)
    if fake.dtype.is_floating_point or fake.dtype.is_complex:
        flat = flat + torch.rand(flat.shape, device=fake.device).to(fake.dtype)
    return lazily(flat.as_strided(fake.shape, fake.stride(), fake.storage_offset()), lazy(fake))


_REPEATS = 3
_MOST_REPEATS = 5
_AS_LONG = 1.5  # of the run before: a longer one was disturbed, by another process, say; chosen
_ENOUGH_SECONDS = 0.02
_LONG_SECONDS = 0.002  # of a kernel that a launch, some 10 μs, is a small part of: it is timed call by call
_IN_A_ROW = 4  # calls between two looks at a GPU's clock: as in a step, the next is queued while one runs


_Clock = Callable[[Callable[[], Any], torch.device, list[torch.Tensor]], Price]


def _clock_for(device: torch.device) -> _Clock:
    return _time_on_cuda if device.type == "cuda" else _time_on_cpu


def _time_on_cpu(call: Callable[[], Any], device: torch.device, reads: list[torch.Tensor]) -> Price:
    """The bytes that kernels take inside are not seen here; those of operators that an operator calls are."""
    tracker = live_storages(device)
    start = time.perf_counter()
    with tracker.mode:
        made = call()
    usual = time.perf_counter() - start
    outputs, workspace = outputs_of(made, reads, device), tracker.made_peak - tracker.made
    del made
    return Price(_seconds_on_cpu(call, usual), workspace, outputs)


def _seconds_on_cpu(call: Callable[[], Any], usual: float) -> float:
    """The least of a few runs, as everything that disturbs a run makes it longer; of a long op, of one.

    `usual` is what it took with its first run's costs: one that takes longer than that is no measure.
    """
    best, spent = float("inf"), 0.0
    for turn in range(_MOST_REPEATS):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
        spent += best
        if best <= _AS_LONG * usual and (turn + 1 >= _REPEATS or spent > _ENOUGH_SECONDS):
            break
    return best


def _time_on_cuda(call: Callable[[], Any], device: torch.device, reads: list[torch.Tensor]) -> Price:
    call()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    made = call()
    torch.cuda.synchronize(device)
    outputs = outputs_of(made, reads, device)
    workspace = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
    del made
    output_bytes = _new_bytes(outputs, device)
    # Against the memory after the call, and before it: where a library keeps some for later calls the two
    # differ, and the smaller one is what this op alone takes and gives back.
    workspace = min(workspace, max(torch.cuda.max_memory_allocated(device) - before - output_bytes, 0))
    return Price(_seconds_on_cuda(call, device), workspace, outputs)


def _seconds_on_cuda(call: Callable[[], Any], device: torch.device) -> float:
    """The median of a few runs, as single ones are disturbed both ways; of a long kernel the shorter of two.

    A launch is hidden behind the kernel before it, as in a step, or is a small part of a long one.
    """
    first = _run_on_cuda(call, device, 1)
    if first > _ENOUGH_SECONDS:
        return min(first, _run_on_cuda(call, device, 1))  # a host that was busy looks like a long kernel
    calls = 1 if first > _LONG_SECONDS else _IN_A_ROW
    times = [first] if calls == 1 else []
    while len(times) < _REPEATS and calls * sum(times) <= _ENOUGH_SECONDS:
        times.append(_run_on_cuda(call, device, calls))
    return sorted(times)[len(times) // 2]


def _run_on_cuda(call: Callable[[], Any], device: torch.device, calls: int) -> float:
    """The seconds of a call, of several in a row."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(calls):
        call()
    end.record()
    torch.cuda.synchronize(device)
    return float(start.elapsed_time(end)) * 1e-3 / calls


class _untouched:  # noqa: N801  # reads as a verb where it is used
    """Run with no autograd, no dispatch modes and no autocast, and put the random state back."""

    def __init__(self, device: torch.device) -> None:
        self.devices = [device] if device.type == "cuda" else []

    def __enter__(self) -> None:
        self.contexts = [
            torch.random.fork_rng(devices=self.devices),
            private("without_modes")(),
            torch.no_grad(),
            private("without_autocast")(),
        ]
        for context in self.contexts:
            context.__enter__()

    def __exit__(self, *failure: Any) -> None:
        for context in reversed(self.contexts):
            context.__exit__(*failure)
