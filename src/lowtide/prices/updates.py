"""What an optimizer takes while it updates some parameters: measured on copies, small ones where exact.

A fused kernel takes nothing, Adam over lists of tensors several times their size, Adafactor what its factors
need. So an optimizer like the user's steps on tensors of the same shapes, on the same device, and the bytes
that it has at most are noted, in a step whose state is there. Rows are mostly independent: with the first
dimension a sixteenth, two and three sixteenths as long, the bytes grow by the same amount each time, and the
whole is extrapolated from there. Where they do not (Muon multiplies whole matrices) the whole size is tried.
What was found is remembered as long as the optimizer lives: a step with `split=` is priced several times.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from ..capture.lift import Lifted
from ..capture.rewrites.stepping import is_update
from ..devices.allocator import rounded
from ..devices.optimizers import like, state_tensors, trying
from ..devices.per_tensor import step_on
from ..measuring.tracker import live_storages

__all__ = ["Owned", "Tried", "with_workspaces"]

_PARTS = 16
_SMALL = 2**16
"""Numbers of a tensor that is tried as it is; chosen."""

_known: WeakKeyDictionary[Any, dict[Any, int]] = WeakKeyDictionary()


class Owned(NamedTuple):
    """An optimizer and that one of its groups which a parameter is in."""

    optimizer: Any
    group: dict[str, Any]


class _Shape(NamedTuple):
    sizes: tuple[int, ...]
    dtype: torch.dtype

    def part(self, count: int) -> _Shape:
        """The shape with its first dimension that many sixteenths as long; small ones stay."""
        numbers = torch.Size(self.sizes).numel()
        if numbers <= _SMALL or self.sizes[0] % _PARTS:
            return self
        return self._replace(sizes=(self.sizes[0] // _PARTS * count, *self.sizes[1:]))


class Tried(NamedTuple):
    """The device on which updates are tried, and the type of the one that they are planned for."""

    device: torch.device
    planned: str


def with_workspaces(lifted: Lifted, owner: Mapping[int, Owned], where: Tried) -> Lifted:
    """The graph with what each update of parameters takes while it runs; owners are by the inputs' places."""
    changed: dict[str, int] = {}
    for name, node in lifted.node_of.items():
        if is_update(node):
            changed[name] = _workspace(node, owner, where)
    if not changed:
        return lifted
    # An optimizer's own time is no part of a plan: it is the same inside of the backward and after it.
    ops = tuple(
        replace(op, workspace=changed[op.name], seconds=0.0) if op.name in changed else op
        for op in lifted.graph.ops
    )
    return replace(lifted, graph=lifted.graph.replace(ops=ops))


def _workspace(node: Any, owner: Mapping[int, Owned], where: Tried) -> int:
    """The most that any group takes: an optimizer goes through its groups one after the other."""
    shapes: dict[int, tuple[Owned, list[_Shape]]] = {}
    for place, gradient in zip(*node.args, strict=True):
        owned, value = owner[place], gradient.meta["val"]
        shapes.setdefault(id(owned.group), (owned, []))[1].append(_Shape(tuple(value.shape), value.dtype))
    most = 0
    for owned, found in shapes.values():
        known = _known.setdefault(owned.optimizer, {})
        options = repr([(name, value) for name, value in owned.group.items() if name != "params"])
        key = options, where, *found
        if key not in known:
            known[key] = _extrapolated(owned, found, where)
        most = max(most, known[key])
    return most


def _extrapolated(owned: Owned, shapes: Sequence[_Shape], where: Tried) -> int:
    parts = [[shape.part(count) for shape in shapes] for count in (1, 2, 3)]
    if parts[0] == list(shapes):
        return _tried(owned, shapes, where)
    first, second, third = (_tried(owned, part, where) for part in parts)
    # A caching allocator rounds every tensor up.
    slack = 8 * len(shapes) * rounded(1, where.device) if where.device.type == "cuda" else 0
    if abs((third - second) - (second - first)) > slack:
        return _tried(owned, shapes, where)
    return max(third + (_PARTS - 3) * (third - first) // 2, third)


def _tried(owned: Owned, shapes: Sequence[_Shape], where: Tried) -> int:
    """The bytes that a step on tensors of these shapes has at most, beside them, gradients and state."""
    with trying():
        parameters = [_made(shape, where.device) for shape in shapes]
        trial = like(owned.optimizer, owned.group, parameters, _as_there(owned.group, where))
        gradients = [torch.zeros_like(parameter) for parameter in parameters]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        chosen = [(trial.param_groups[0], parameters)]
        for _ in range(2):  # what is made once is state, and counted as such
            step_on(trial, chosen)
        held = [*parameters, *gradients, *state_tensors(trial)]
        return _most(lambda: step_on(trial, chosen), where.device, held)


def _as_there(group: dict[str, Any], where: Tried) -> dict[str, Any]:
    """What an optimizer chooses by itself on the planned device, where it is tried on another."""
    if where.planned == where.device.type:
        return {}
    plain = group.get("foreach") is None and not group.get("fused")
    return {"capturable": False, **({"foreach": True} if plain and where.planned == "cuda" else {})}


def _made(shape: _Shape, device: torch.device) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(shape.sizes, dtype=shape.dtype, device=device))


def _most(step: Callable[[], Any], device: torch.device, held: Sequence[torch.Tensor]) -> int:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        return max(torch.cuda.max_memory_allocated(device) - before, 0)
    tracker = live_storages(device)
    for tensor in held:
        tracker.give(tensor)
    with tracker.mode:
        step()
    return tracker.made_peak
