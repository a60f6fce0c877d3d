"""What modules hold, what is in their tensors, and random states: as they are now, to be put back later."""

from __future__ import annotations

import copy
import random
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from .._torch import inner_tensors, private, private_of, storage_key
from ..torch_state.dispatch_modes import in_place_of_operators

__all__ = ["Attributes", "Tensors", "bytes_of", "host_copy", "is_tensor"]

_CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict)


_PLAIN = (bool, int, float, complex, str, bytes)


_leaves = private("tree_leaves")


class Attributes:
    """What the attributes of modules hold, and what is in containers among them: hooks, buffers, caches."""

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        self.kept = {
            module: {name: (value, _contents(value)) for name, value in vars(module).items()}
            for root in modules
            for module in root.modules()
        }

    def restore(self, only: set[tuple[torch.nn.Module, str]] | None = None) -> None:
        """Put all of it back, or what is named."""
        for module, kept in self.kept.items():
            for name in [*vars(module), *kept]:
                if only is not None and (module, name) not in only:
                    continue
                if name not in kept:
                    vars(module).pop(name, None)
                    continue
                value, contents = kept[name]
                vars(module)[name] = value
                _refill(value, contents)

    def changed(self, later: Attributes) -> set[tuple[torch.nn.Module, str]]:
        """What is not the same at a later time, by module and name."""
        found = set()
        for module, after in later.kept.items():
            before = self.kept.get(module, {})
            for name in {*before, *after}:
                if not (name in before and name in after and _alike(before[name], after[name])):
                    found.add((module, name))
        return found

    def tensors(self) -> Iterator[torch.Tensor]:
        """The tensors that are held."""
        for kept in self.kept.values():
            for value, contents in kept.values():
                items = contents.values() if isinstance(contents, dict) else contents or ()
                yield from (item for item in (value, *items) if isinstance(item, torch.Tensor))


def _contents(value: Any) -> Any:
    # One level: hooks and buffers are dictionaries of modules; what is inside their values is not looked at.
    return copy.copy(value) if type(value) in _CONTAINERS else None


def _refill(value: Any, contents: Any) -> None:
    if contents is None:
        return
    value.clear()
    (value.update if isinstance(contents, dict | set) else value.extend)(contents)


def _alike(left: Any, right: Any) -> bool:
    """Whether two things are the same object, or numbers or words that are equal, or made of such."""
    if left is right:
        return True
    if type(left) is not type(right):
        return False
    if isinstance(left, _PLAIN):
        return bool(left == right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_alike(left[key], right[key]) for key in left)
    if isinstance(left, set):
        return bool(left == right)
    if isinstance(left, list | tuple | deque):
        return len(left) == len(right) and all(map(_alike, left, right))
    return False


class Tensors:
    """Tensors and random states as they are now, to be put back after a run: copied when they are written to.

    Buffers are copied beforehand: operators that update statistics do not say that they write to them.
    """

    def __init__(self, modules: Iterable[torch.nn.Module], others: Iterable[torch.Tensor]) -> None:
        owners = [owner for module in modules for owner in module.modules()]
        self.buffers = [
            (owner, name, buffer, buffer.detach().clone())
            for owner in owners
            for name, buffer in private_of(owner, "buffers").items()
            if buffer is not None
        ]
        parameters = [parameter for owner in owners for parameter in private_of(owner, "parameters").values()]
        self.parameters = [(p, p.detach(), p.grad) for p in parameters if p is not None]
        gradients = [gradient for _, _, gradient in self.parameters if gradient is not None]
        # By storage, so that a write through a view is seen, too.
        watched = [*(alias for _, alias, _ in self.parameters), *gradients, *others]
        self.watched = {storage_key(tensor): tensor for tensor in _strided(watched)}
        self.copies: dict[int, torch.Tensor] = {}
        self.written: set[int] = set()
        self.random = _random_states()
        self.generators: dict[torch.Generator, torch.Tensor] = {}

    def watch(self) -> Any:
        """A mode under which what is written to is copied before."""
        return in_place_of_operators(self.call)

    def call(self, operator: Any, args: Any, kwargs: Any) -> Any:
        own = kwargs.get("generator") if kwargs else None
        if isinstance(own, torch.Generator) and own not in self.generators:
            self.generators[own] = own.get_state()
        schema = private_of(operator, "schema", None)
        if schema is not None and schema.is_mutable:
            for tensor in _strided(_leaves((args, kwargs))):
                self.keep(storage_key(tensor))
        return operator(*args, **kwargs)

    def keep(self, key: int) -> None:
        if key in self.watched:
            self.written.add(key)
            if key not in self.copies:
                self.copies[key] = bytes_of(self.watched[key]).to("cpu", copy=True)

    def found(self) -> list[Any]:
        """What the run left: what it wrote, buffers, and random states."""
        writes = {key: bytes_of(self.watched[key]).to("cpu", copy=True) for key in sorted(self.written)}
        buffers = [host_copy(private_of(owner, "buffers").get(name)) for owner, name, _, _ in self.buffers]
        drawn = [generator.get_state() for generator in self.generators]
        return [list(writes), *writes.values(), *buffers, *drawn, *_random_states()]

    def restore(self) -> None:
        with torch.no_grad():
            for owner, name, buffer, kept in self.buffers:
                private_of(owner, "buffers")[name] = buffer.copy_(kept)
        for parameter, alias, gradient in self.parameters:
            if list(map(storage_key, _strided([parameter]))) != list(map(storage_key, _strided([alias]))):
                parameter.data = alias
            parameter.grad = gradient
        for key in self.written:
            bytes_of(self.watched[key]).copy_(self.copies[key])
        self.written.clear()
        for generator, state in self.generators.items():
            generator.set_state(state)
        _set_random_states(self.random)


def _strided(items: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors among some things that have a storage; of one that is made of others, those."""
    for tensor in (inner for item in items for inner in inner_tensors(item).values()):
        if tensor.layout == torch.strided:
            yield tensor


def is_tensor(item: Any) -> bool:
    """Whether something is a tensor."""
    return isinstance(item, torch.Tensor)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of what a tensor looks at."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())  # type: ignore[no-any-return,call-overload]


def host_copy(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """A copy of a tensor on the host, contiguous."""
    return None if tensor is None else tensor.detach().to("cpu", copy=True).contiguous()


def _random_states() -> list[Any]:
    """Of Python, of NumPy where it is in use, and of torch on each device."""
    numpy = sys.modules.get("numpy")
    name, keys, *rest = ("", None) if numpy is None else numpy.random.get_state()
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    drawn = (name, None if keys is None else keys.tobytes(), *rest)
    return [random.getstate(), drawn, torch.get_rng_state(), *devices]


def _set_random_states(states: list[Any]) -> None:
    python, (name, keys, *rest), cpu, *devices = states
    random.setstate(python)
    if keys is not None:
        numpy = sys.modules["numpy"]
        numpy.random.set_state((name, numpy.frombuffer(keys, dtype=numpy.uint32), *rest))
    torch.set_rng_state(cpu)
    if devices:
        torch.cuda.set_rng_state_all(devices)
