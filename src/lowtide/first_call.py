"""Steps whose first call installs things: hooks under a lock, caches, tables, buffers.

torch cannot capture some of that. So where a capture fails, the step is run plainly and captured once more.
It is run twice, each time from the same tensors and random state: what the second run leaves alone is what
the first one installed, and stays; what both change (a counter, BatchNorm's statistics) is put back, and the
captured step will do it. Where the two give other results, the first call is not like later ones, and no
capture of a later call may stand for it. Nothing is saved for a backward in these runs, and parameters
are copied only where the step writes to them.
"""

from __future__ import annotations

import copy
import random
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from ._torch import private
from .measure import storage_key
from .modes import in_place_of_operators, without_foreign_modes

__all__ = ["Attributes", "install", "may_install"]

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

    def __init__(self, modules: Iterable[torch.nn.Module], held: Iterable[torch.Tensor]) -> None:
        owners = [owner for module in modules for owner in module.modules()]
        self.buffers = [
            (owner, name, buffer, buffer.detach().clone())
            for owner in owners
            for name, buffer in owner._buffers.items()
            if buffer is not None
        ]
        parameters = [parameter for owner in owners for parameter in owner._parameters.values()]
        self.parameters = [(p, p.detach(), p.grad) for p in parameters if p is not None]
        gradients = [gradient for _, _, gradient in self.parameters if gradient is not None]
        watched = [*(alias for _, alias, _ in self.parameters), *gradients, *held]
        self.watched = {storage_key(tensor): tensor for tensor in watched if tensor.layout == torch.strided}
        self.copies: dict[int, torch.Tensor] = {}
        self.written: set[int] = set()
        self.random = _random_states()

    def watch(self) -> Any:
        """A mode under which what is written to is copied before."""
        return in_place_of_operators(self.call)

    def call(self, operator: Any, args: Any, kwargs: Any) -> Any:
        schema = getattr(operator, "_schema", None)
        if schema is not None and schema.is_mutable:
            for tensor in _leaves((args, kwargs)):
                if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided:
                    self.keep(storage_key(tensor))
        return operator(*args, **kwargs)

    def keep(self, key: int) -> None:
        if key in self.watched:
            self.written.add(key)
            if key not in self.copies:
                self.copies[key] = _bytes_of(self.watched[key]).to("cpu", copy=True)

    def found(self) -> list[Any]:
        """What the run left: what it wrote, buffers, and random states."""
        writes = {key: _bytes_of(self.watched[key]).to("cpu", copy=True) for key in sorted(self.written)}
        buffers = [_host(owner._buffers.get(name)) for owner, name, _, _ in self.buffers]
        return [list(writes), *writes.values(), *buffers, *_random_states()]

    def restore(self) -> None:
        with torch.no_grad():
            for owner, name, buffer, kept in self.buffers:
                owner._buffers[name] = buffer.copy_(kept)
        for parameter, alias, gradient in self.parameters:
            if storage_key(parameter) != storage_key(alias):
                parameter.data = alias
            parameter.grad = gradient
        for key in self.written:
            _bytes_of(self.watched[key]).copy_(self.copies[key])
        self.written.clear()
        _set_random_states(self.random)


def may_install(modules: list[torch.nn.Module], inputs: Any) -> bool:
    """Whether a step may be run plainly for what its first call installs.

    Not where it would use up an iterator, under transforms of torch.func, nor with DistributedDataParallel
    inside, which waits for a backward after each call.
    """
    if private("functorch_level")() is not None or not private("saving_hooks_allowed")():
        return False
    if any(hasattr(leaf, "__next__") for leaf in _leaves(inputs)):
        return False
    parts = [part for module in modules for part in module.modules()]
    return not any(isinstance(part, torch.nn.parallel.DistributedDataParallel) for part in parts)


def install(call: Callable[[], Any], modules: list[torch.nn.Module], inputs: Any) -> str | None:
    """Let the first call of a step install what it does; gives that in words, or None.

    None where the first call does not do what the next ones do: the step is as it was then.
    What the step itself raises is raised.
    """
    before = Attributes(modules)
    state = Tensors(modules, [*before.tensors(), *(t for t in _leaves(inputs) if _is_tensor(t))])
    try:
        first, second = (_run(call, state, modules) for _ in range(2))
    except BaseException:
        state.restore()
        before.restore()
        raise
    (results, after), (again, later) = first, second
    installed = before.changed(after)
    each_time = after.changed(later)
    carried = any(tensor.grad_fn is not None for tensor in after.tensors())
    if carried or not _same(results, again):
        before.restore()
        return None
    before.restore(each_time)
    return _in_words(installed - each_time)


def _run(
    call: Callable[[], Any], state: Tensors, modules: list[torch.nn.Module]
) -> tuple[list[Any], Attributes]:
    """Run the step with nothing saved for a backward: its results on the host, and what modules hold then."""
    with without_foreign_modes(), state.watch(), _saving_nothing():
        output = call()
    results = [_host(leaf) if _is_tensor(leaf) else None for leaf in _leaves(output)]
    results += state.found()
    state.restore()
    return results, Attributes(modules)


def _saving_nothing() -> Any:
    def unpack(_: Any) -> Any:
        raise RuntimeError("this run of the step keeps nothing for a backward")

    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, unpack)


_TABLES = {
    "_buffers": "makes buffers",
    "_parameters": "makes parameters",
    "_modules": "makes modules",
}


def _in_words(changed: set[tuple[torch.nn.Module, str]]) -> str:
    names = sorted({name for _, name in changed})
    if any("_hooks" in name for name in names):
        return "installs hooks"
    for table, words in _TABLES.items():
        if table in names:
            return words
    return f"sets {names[0]!r}" if names else "prepares something that torch cannot capture"


def _same(left: list[Any], right: list[Any]) -> bool:
    return len(left) == len(right) and all(map(_equal, left, right))


def _equal(left: Any, right: Any) -> bool:
    if not (_is_tensor(left) and _is_tensor(right)):
        return bool(left == right)
    if (left.shape, left.dtype, left.layout) != (right.shape, right.dtype, right.layout):
        return False
    return left.layout != torch.strided or torch.equal(_bytes_of(left), _bytes_of(right))


def _is_tensor(item: Any) -> bool:
    return isinstance(item, torch.Tensor)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of what a tensor looks at."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())  # type: ignore[no-any-return,call-overload]


def _host(tensor: torch.Tensor | None) -> torch.Tensor | None:
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
