"""What the steps of optimizers show of caps: state that no plan counts, and training that went past a plan.

A cap sees the calls of what was capped and nothing else. torch runs hooks at every step of every optimizer;
ours come with the first cap, hold nothing alive and leave the optimizer alone. They note when the state of an
optimizer has grown, so that the next call of a capped step is planned with it, and say once where parameters
of something capped were trained while no call of it went through a plan. While torch.compile traces a step
they do nothing: a step inside of compiled code is not seen.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..devices.arena import let_state_in, state_is_in
from ..devices.optimizers import each_optimizer, levels, state_bytes, state_tensors

__all__ = [
    "Seen",
    "capped_around",
    "changes",
    "forget",
    "look_at_steps",
    "present_state",
    "seen",
    "seen_for",
    "stepped_since_call",
    "watch",
]

_CUDA = torch.device("cuda")
_OFTEN = 128
"""Steps between two full counts of a state whose outlines have not changed; chosen."""


class Capped(Protocol):
    """Something capped: a module or a function, and how many of its calls went through a plan."""

    module: torch.nn.Module | None
    calls: int

    @property
    def name(self) -> str:
        """What a user calls it."""

    def trained(self) -> Iterable[torch.Tensor]:
        """What it trains, as far as that is known."""

    def say(self, message: str) -> None:
        """Say something once."""

    def __hash__(self) -> int: ...


class Seen:
    """An optimizer that has stepped, or that a plan counts; it is not held.

    `at_first` is what its state took on the GPU when it was first seen: plans made before that read it from
    the device's allocator.
    """

    def __init__(self, optimizer: Any) -> None:
        key = id(optimizer)
        self.optimizer = weakref.ref(optimizer, lambda _: _seen.pop(key, None))
        self.name = type(optimizer).__name__
        self.at_first = state_bytes(optimizer, _CUDA)
        self.steps = 0
        self.outline: Any = None
        self.bytes = 0
        self.calls: weakref.WeakKeyDictionary[Capped, int] = weakref.WeakKeyDictionary()

    def grew(self, optimizer: Any) -> bool:
        """Whether the state is not that of the last step, by its outline and now and then by its bytes."""
        state = getattr(optimizer, "state", {})
        first: Any = next(iter(state.values()), {})
        lengths = [len(item) for item in first.values() if isinstance(item, list)]  # as LBFGS has
        outline = (len(optimizer.param_groups), len(state), len(first), lengths)
        if outline == self.outline and not self.is_due():
            return False
        before, self.outline = self.bytes, outline
        self.bytes = sum(tensor.nbytes for tensor in state_tensors(optimizer))
        return self.bytes != before

    def is_due(self) -> bool:
        """Whether to look closely at this step: one of the first, a power of two, or one in a hundred."""
        return self.steps < 4 or not self.steps & (self.steps - 1) or not self.steps % _OFTEN


_caps: weakref.WeakSet[Capped] = weakref.WeakSet()
_planned: weakref.WeakSet[Any] = weakref.WeakSet()
_with_gradients: weakref.WeakSet[Capped] = weakref.WeakSet()
_seen: dict[int, Seen] = {}
_changes = 0
_hooks: list[Any] = []


def changes() -> int:
    """A number that is another one whenever the state of some optimizer has changed its size."""
    return _changes


def watch(capped: Capped) -> None:
    """Look at the steps of optimizers for something capped."""
    look_at_steps(capped)
    _caps.add(capped)
    if any(parameter.grad is not None for parameter in capped.trained()):
        _with_gradients.add(capped)  # the next step may be that of a backward before the cap


def look_at_steps(planned: Any) -> None:
    """Look at the steps of optimizers while something planned is there; hooks come once in a process."""
    _planned.add(planned)
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_before_step))
        _hooks.append(register_optimizer_step_post_hook(_after_step))


def forget(capped: Capped) -> None:
    """Look no longer for something that is capped no more."""
    _caps.discard(capped)
    _planned.discard(capped)


def seen(optimizer: Any) -> Seen:
    """What is known of an optimizer."""
    found = _seen.get(id(optimizer))
    if found is None:
        found = _seen[id(optimizer)] = Seen(optimizer)
    return found


def seen_for(
    trained: Iterable[weakref.ref[torch.Tensor]], device: torch.device
) -> Iterator[tuple[Seen, Any]]:
    """The optimizers that have stepped and whose state counts beside a step.

    On the CPU those of what the step trains; on a GPU all, since all that is there counts.
    """
    own = {id(ref()) for ref in trained}
    for one in list(_seen.values()):
        optimizer = one.optimizer()
        if optimizer is not None and one.steps and (device.type == "cuda" or _trains(optimizer, own)):
            yield one, optimizer


def stepped_since_call(capped: Capped) -> bool:
    """Whether an optimizer of what something capped trains has stepped since its last call."""
    stepped = [one for one in list(_seen.values()) if capped.calls and one.calls.get(capped) == capped.calls]
    own = set(map(id, capped.trained())) if stepped else set()
    return any(_trains(optimizer, own) for one in stepped if (optimizer := one.optimizer()) is not None)


def present_state(announced: Any, trained: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The state that is there and that a plan on the CPU counts: of what was announced or has stepped."""
    held = [level for one in each_optimizer(announced) for level in levels(one)]
    held += [optimizer for _, optimizer in seen_for(map(weakref.ref, trained), torch.device("cpu"))]
    return [tensor for optimizer in held for tensor in state_tensors(optimizer)]


def _trains(optimizer: Any, own: set[int]) -> bool:
    return any(id(p) in own for group in optimizer.param_groups for p in group["params"])


def capped_around(part: torch.nn.Module) -> str | None:
    """The class of a capped module that a module is part of."""
    if not _around(part):
        return None
    gc.collect()  # a module and its cap refer to each other, and may be unused since long
    return next(iter(_around(part)), None)


def _around(part: torch.nn.Module) -> list[str]:
    modules = (one.module for one in list(_caps) if one.module is not None and one.module is not part)
    return [type(module).__name__ for module in modules if any(each is part for each in module.modules())]


def _before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    if not torch.compiler.is_compiling() and _planned:
        let_state_in()
        seen(optimizer)


def _after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    if not torch.compiler.is_compiling() and _planned:
        state_is_in()
        _look(optimizer)


def _look(optimizer: Any) -> None:
    global _changes  # one number for the process, as torch's hooks are
    now = seen(optimizer)
    now.steps += 1
    if now.grew(optimizer):
        _changes += 1
    called: list[Capped] = []
    others: list[Capped] = []
    for capped in list(_caps):
        calls = capped.calls
        (others if calls == now.calls.get(capped, 0) else called).append(capped)
        now.calls[capped] = calls
    if others and now.is_due():
        _say_what_went_past(optimizer, called, others)


def _say_what_went_past(optimizer: Any, called: list[Capped], others: list[Capped]) -> None:
    """Say where parameters have gradients that no call since the last step can have made."""
    moved = {id(p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
    for capped in called:
        moved -= set(map(id, capped.trained()))
    for capped in others:
        if moved.isdisjoint(map(id, capped.trained())):
            continue
        if capped in _with_gradients:
            _with_gradients.discard(capped)
        else:
            capped.say(_went_past(capped))


def _went_past(capped: Capped) -> str:
    module = capped.module
    how = "never" if not capped.calls else "not since the step before"
    told = (
        f"{capped.name} is capped, and an optimizer step has trained it, but it was {how} called under its "
        "plan: "
    )
    if module is not None and not module.training:
        return told + "it is in eval mode, where it runs plainly; model.train() before the training step"
    return told + (
        "only calls of what was capped are planned, as in model(x); not model.forward(x), not its parts or "
        "methods. Cap what the training step calls"
    )
