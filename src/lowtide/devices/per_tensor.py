"""An optimizer's step on some of its parameters alone, and whether that is the same as on all at once.

For most optimizers it is: SGD, Adam and their kin look at one tensor at a time, whether they loop over them,
hand lists to `torch._foreach_*` or to one fused kernel. For some it is not (a norm over all parameters, a
step size that is estimated from all of them, a count of calls, a closure, random numbers). Nobody has a list,
so it is tried: an optimizer like the user's, over a few small tensors, steps on all together, and one like it
on one after the other, with a step without gradients at the end, as a training loop has it. What the two
leave must have the same bits.
"""

from __future__ import annotations

import inspect
import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from .._torch import (
    changes_gradients,
    steps_as_its_class,
    unhooked,
    without_optimizer_hooks,
)
from ..errors import LowtideError
from .optimizers import each_optimizer, levels, like, trying, wraps

__all__ = ["Chosen", "innermost", "is_stepping", "looked_at", "refuse_joint_updates", "step_on"]

Chosen = Sequence[tuple[dict[str, Any], list[torch.nn.Parameter]]]
"""Groups of an optimizer, with those of their parameters that a step is for."""

_FORWARDING = ("accelerate", "lightning", "pytorch_lightning", "lightning_fabric")
"""Packages whose wrappers of optimizers step the one inside and do nothing to its gradients."""

_FUSED_ON_CPU = (torch.float32, torch.float64, torch.bfloat16)

_ROUNDS = 3
_SHAPES = ((4, 3), (5,), (2, 3))


def step_on(optimizer: Any, chosen: Chosen) -> None:
    """The update of some parameters by their gradients, unseen by hooks and by counters of steps."""
    with _restricted(optimizer, chosen), without_optimizer_hooks(), unhooked(optimizer):
        _under_way.step = True
        try:
            type(optimizer).step(optimizer)
        finally:
            _under_way.step = False


_under_way = threading.local()


def is_stepping() -> bool:
    """Whether such an update runs in this thread: it makes numbers past every operator."""
    return getattr(_under_way, "step", False)


@contextmanager
def _restricted(optimizer: Any, chosen: Chosen) -> Iterator[None]:
    groups = optimizer.param_groups
    whole = [(group, group["params"]) for group, _ in chosen]
    try:
        optimizer.param_groups = [group for group, _ in chosen]
        for group, parameters in chosen:
            group["params"] = parameters
        yield
    finally:
        for group, parameters in whole:
            group["params"] = parameters
        optimizer.param_groups = groups


def innermost(optimizer: Any) -> Any:
    """The optimizer that updates parameters, inside of what wraps it; refuses wrappers that do more."""
    name = type(optimizer).__name__
    if getattr(optimizer, "scaler", None) is not None:
        raise _refused(name, "it scales gradients (GradScaler), and looks at all of them before it steps")
    *outer, inner = levels(optimizer)
    forwards = type(optimizer).__module__.partition(".")[0] in _FORWARDING
    if outer or (wraps(optimizer) and not forwards):
        raise _refused(name, "it wraps another optimizer, and what it does besides is not known")
    if not isinstance(inner, torch.optim.Optimizer):
        raise _refused(name, "it is no torch.optim.Optimizer, so its steps cannot be seen")
    return inner


def refuse_joint_updates(given: Any) -> None:
    """Refuse optimizers that cannot step on one parameter after the other, by name and with the reason."""
    owners: dict[int, str] = {}
    for optimizer in map(innermost, each_optimizer(given)):
        name = type(optimizer).__name__
        if reason := _reason(optimizer):
            raise _refused(name, reason)
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if owners.setdefault(id(parameter), name) is not name:
                raise _refused(name, f"a parameter of it is in {owners[id(parameter)]}, too")


def _refused(name: str, reason: str) -> LowtideError:
    return LowtideError(
        f"step_in_backward=True cannot be used with {name}: {reason}. Leave step_in_backward out, and call "
        f"{name}.step() after the backward as ever; or take an optimizer whose update of a tensor depends on "
        "that tensor alone, as AdamW, SGD or Adafactor"
    )


def _reason(optimizer: Any) -> str | None:
    """Why an optimizer cannot step on one parameter after the other; None where it can."""
    step = inspect.signature(type(optimizer).step).parameters
    if any(p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in list(step.values())[1:]):
        return "its step() needs a closure, which runs the model again"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return "with differentiable=True its step is recorded by autograd"
    if (found := looked_at(optimizer)) is not None:
        return found
    for group in optimizer.param_groups:
        if (found := _tried(optimizer, group)) is not None:
            return found
    return None


def looked_at(optimizer: Any) -> str | None:
    """What would find no gradients when an optimizer steps; None where there is nothing."""
    if not steps_as_its_class(optimizer):
        return "something else stands in the place of its step()"
    if changes_gradients(optimizer):
        return "a hook runs before its step (register_step_pre_hook), and would find no gradients"
    return None


def _tried(optimizer: Any, group: dict[str, Any]) -> str | None:
    """What goes wrong where small tensors of a group are stepped on one by one; None where nothing does."""
    dtype, ndims = _kind(group)
    with trying():
        together, alone = (_small(ndims, dtype) for _ in range(2))
        changed = {"capturable": False, **_numbers(group)}
        try:
            whole, parts = (like(optimizer, group, list(each), changed) for each in (together, alone))
            random = torch.get_rng_state()
            for number in range(_ROUNDS):
                _give_gradients(together, number)
                type(whole).step(whole)
                _give_gradients(alone, number)
                _step_one_by_one(parts, alone)
            drawn = not torch.equal(random, torch.get_rng_state())
            left = (_left(one, each) for one, each in ((whole, together), (parts, alone)))
            same = _same(*left)
        except Exception as error:
            return f"its step on one parameter alone was tried and failed ({type(error).__name__}: {error})"
    if drawn:
        return "its step draws random numbers, which would come in another order"
    return None if same else "its update of a tensor depends on the others, or it counts its calls"


def _step_one_by_one(optimizer: Any, parameters: Iterable[torch.nn.Parameter]) -> None:
    """As inside of a backward, and the step of the training loop afterwards, which finds no gradients."""
    (group,) = optimizer.param_groups
    for parameter in parameters:
        step_on(optimizer, [(group, [parameter])])
        parameter.grad = None
    type(optimizer).step(optimizer)


def _kind(group: dict[str, Any]) -> tuple[torch.dtype, set[int]]:
    trained = [parameter for parameter in group["params"] if parameter.requires_grad] or group["params"]
    dtype = trained[0].dtype if trained else torch.float32
    dtype = dtype if dtype in _FUSED_ON_CPU else torch.float32
    return dtype, {parameter.ndim for parameter in trained} & {1, 2} or {2}


def _numbers(group: dict[str, Any]) -> dict[str, float]:
    """The options that are tensors of one number, perhaps on a GPU, as plain numbers."""
    tensors = {name: value for name, value in group.items() if isinstance(value, torch.Tensor)}
    return {name: value.item() for name, value in tensors.items() if value.numel() == 1}


def _small(ndims: set[int], dtype: torch.dtype) -> list[torch.nn.Parameter]:
    shapes = [shape for shape in _SHAPES if len(shape) in ndims]
    shapes = shapes if len(shapes) > 1 else shapes * 2
    return [torch.nn.Parameter(_wave(shape, dtype, at)) for at, shape in enumerate(shapes)]


def _give_gradients(parameters: Sequence[torch.nn.Parameter], number: int) -> None:
    for at, parameter in enumerate(parameters):
        parameter.grad = _wave(tuple(parameter.shape), parameter.dtype, number * 7 + at + 3)


def _wave(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Numbers that look random, without a draw."""
    count = math.prod(shape)
    return torch.sin(torch.arange(count, dtype=torch.float64) * (seed + 1.3)).reshape(shape).to(dtype)


def _left(optimizer: Any, parameters: Sequence[torch.nn.Parameter]) -> list[Any]:
    """What steps have left: parameters, their state, and what groups hold beside them."""
    (group,) = optimizer.param_groups
    held = [(name, value) for name, value in group.items() if name != "params"]
    states = [sorted(optimizer.state[p].items()) for p in parameters if p in optimizer.state]
    return [list(parameters), states, len(optimizer.state), held]


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and torch.equal(left.detach(), right.detach())
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(_same, left, right))
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_same(left[key], right[key]) for key in left)
    return left is right or bool(left == right)
