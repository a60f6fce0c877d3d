"""Optimizers as users hand them in: what they wrap, what their state takes, what a first step makes.

Nothing here writes to them. A wrapper (of accelerate, Lightning, torch's ZeroRedundancyOptimizer, or the
user's own) forwards what is set on it to the optimizer inside, so it is unwrapped before anything is tried;
and what is tried is an object of its own, made by the class or from private copies, whose only parameter is
a small one. Hooks do not run, and the random state stays.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from .._torch import inner_tensors, is_optimizer_hook, private, storage_key, without_optimizer_hooks
from ..errors import LowtideError
from .allocator import rounded

__all__ = [
    "each_optimizer",
    "first_state",
    "levels",
    "like",
    "state_bytes",
    "state_tensors",
    "trying",
    "wraps",
]

_INNER = ("optimizer", "_optimizer", "optim", "base_optimizer")
"""Where a wrapper has what it wraps: accelerate and DeepSpeed, Lightning, torch.distributed, SAM."""

_DEEPEST = 8
_MOST_COPIED = 2**24
"""The most bytes of an optimizer's own attributes that are copied to try a step; chosen."""

SIZES = (2, 3, 5, 7, 11, 13, 17, 19)
"""The sizes that tell the dimensions of a small parameter apart."""


def each_optimizer(given: Any) -> list[Any]:
    """The optimizers that `optimizer=` names: none, one, or several."""
    if given is None:
        return []
    return list(given) if isinstance(given, list | tuple) else [given]


def levels(optimizer: Any) -> list[Any]:
    """An optimizer and those that it wraps, the innermost last, without those that show another's state."""
    found: list[Any] = []
    while optimizer is not None and len(found) < _DEEPEST and not _is_among(optimizer, found):
        found.append(optimizer)
        optimizer = _inner(optimizer)
    states = [getattr(level, "state", None) for level in found]
    return [level for place, level in enumerate(found) if not _is_among(states[place], states[place + 1 :])]


def _is_among(item: Any, others: list[Any]) -> bool:
    return any(item is other for other in others)


def wraps(optimizer: Any) -> bool:
    """Whether an optimizer has another one inside."""
    return _inner(optimizer) is not None


def _inner(optimizer: Any) -> Any:
    inner = (getattr(optimizer, name, None) for name in _INNER)
    return next((one for one in inner if hasattr(one, "param_groups") and hasattr(one, "step")), None)


def state_bytes(optimizer: Any, device: torch.device) -> int:
    """The bytes that an optimizer's own state takes on a device; what it wraps is not looked at."""
    sizes: dict[int, int] = {}
    for tensor in state_tensors(optimizer):
        if tensor.device.type == device.type:
            sizes[storage_key(tensor)] = tensor.untyped_storage().nbytes()
    return sum(rounded(size, device) for size in sizes.values())


def state_tensors(optimizer: Any) -> list[torch.Tensor]:
    """The tensors of an optimizer's own state."""
    return list(_tensors(getattr(optimizer, "state", None)))


def _tensors(tree: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """The tensors in a nest of containers; of a subclass that is made of others, those."""
    if isinstance(tree, torch.Tensor):
        yield from (each for each in inner_tensors(tree).values() if each.layout == torch.strided)
    elif isinstance(tree, _CONTAINERS) and depth < _DEEPEST:
        for item in tree.values() if isinstance(tree, Mapping) else tree:
            yield from _tensors(item, depth + 1)


_CONTAINERS = (dict, Mapping, list, tuple, set, frozenset)


@contextmanager
def trying() -> Iterator[None]:
    """What an optimizer is tried in: no mode, autocast or hook of the caller sees it; nothing warns."""
    with (
        private("without_modes")(),
        private("without_autocast")(),
        torch.random.fork_rng(devices=[]),
        torch.no_grad(),
        without_optimizer_hooks(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield


def first_state(optimizer: Any, group: dict[str, Any], dtype: torch.dtype, ndim: int) -> dict[str, Any]:
    """What a first step makes for a small parameter of `ndim` dimensions, each of another size.

    What it makes may depend on them: Adafactor keeps rows and columns of a matrix, Muon takes nothing else.
    """
    with trying():
        small = torch.nn.Parameter(torch.zeros(SIZES[: max(ndim, 1)], dtype=dtype, device="cpu"))
        small.grad = torch.zeros_like(small)
        try:
            trial = like(optimizer, group, [small], dict.fromkeys(_NOT_TRIED, False))
            type(trial).step(trial)
        except Exception as error:
            raise LowtideError(
                f"cannot tell the state of {type(optimizer).__name__} before its first step ({error}); "
                "take one step before capping, or leave optimizer= out and subtract it from the budget"
            ) from error
    return dict(trial.state.get(small) or {})


def like(
    optimizer: Any, group: dict[str, Any], parameters: list[torch.nn.Parameter], changed: dict[str, Any]
) -> Any:
    """An optimizer like the user's that shares nothing with it, over other parameters in one group.

    `changed` are options of the group that it has otherwise.
    """
    groups: list[dict[str, Any]] = []
    state: Any = defaultdict(dict)
    memo: dict[int, Any] = {id(p): parameters[0] for each in optimizer.param_groups for p in each["params"]}
    memo[id(optimizer.param_groups)] = groups
    if hasattr(optimizer, "state"):
        memo[id(optimizer.state)] = state
    named = {name: value for name, value in group.items() if name not in ("params", "param_names")}
    options = copy.deepcopy(named, memo) | {name: new for name, new in changed.items() if name in named}
    groups.append({**options, "params": parameters})
    memo[id(optimizer)] = trial = _made(type(optimizer), options, parameters)
    state.update(_made_at_once(trial, parameters))
    vars(trial).update(_copies(optimizer, trial, memo), param_groups=groups, state=state)
    return trial


_NOT_TRIED = ("fused", "capturable", "differentiable")
"""What changes where a step runs, and of its state only on which device the numbers are."""


def _made(kind: type, options: dict[str, Any], parameters: list[torch.nn.Parameter]) -> Any:
    """An instance by the constructor, where it takes what a group has; else by torch's own."""
    try:
        takes = inspect.signature(kind).parameters
        return kind(parameters, **{name: value for name, value in options.items() if name in takes})
    except Exception:
        trial: Any = object.__new__(kind)
        if isinstance(trial, torch.optim.Optimizer):
            torch.optim.Optimizer.__init__(trial, parameters, dict(options))
        return trial


def _made_at_once(trial: Any, parameters: list[torch.nn.Parameter]) -> dict[Any, Any]:
    """The state that an optimizer has before its first step, as torch's Adagrad; 2.11 makes none later."""
    state = getattr(trial, "state", {})
    return {each: state[each] for each in parameters if each in state}


def _copies(optimizer: Any, trial: Any, memo: dict[int, Any]) -> dict[str, Any]:
    """Private copies of an optimizer's attributes, hooks and replaced methods left out.

    One that cannot be copied is as the constructor makes it.
    """
    own = {
        name: value
        for name, value in vars(optimizer).items()
        if not is_optimizer_hook(name) and not callable(getattr(type(optimizer), name, None))
    }
    held = {id(tensor): tensor for tensor in _tensors({**own, "state": None}) if id(tensor) not in memo}
    if sum(tensor.untyped_storage().nbytes() for tensor in held.values()) > _MOST_COPIED:
        raise LowtideError("it holds tensors of its own that are too large to copy")
    found = {}
    for name, value in own.items():
        if isinstance(value, torch.nn.Module):  # a cap does not go with a copy, and need not say so here
            memo.update((id(vars(part).get("__lowtide__", ())), None) for part in value.modules())
        try:
            found[name] = copy.deepcopy(value, memo)
        except Exception:
            if name not in vars(trial):
                raise
    return found
