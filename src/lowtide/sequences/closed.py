"""Tensors that a cell reads without being given them: parameters, and whatever else it closes over.

They must be inputs of the scan for autograd, so that their gradients arrive as any gradient does: with hooks,
with `torch.autograd.grad`, in DDP. Three ways to find them, together:

- what can be reached from the cell (`reachable`);
- what the functions of torch are called with while the first unit runs;
- what the graph of every unit leads to that goes backward: a tensor that is found there, but was not in the
  first unit, came too late and is refused, as its gradient would be lost.

Results of other computations cannot be differentiated with respect to as they stand: their own graph would be
walked, and freed, at every unit. While units run, detached copies stand in for them in every call
(`standing_in`). Hooks of tensors are not for the gradients of single units: they are hidden meanwhile
(`without_hooks`).
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .._torch import private, private_of, set_private
from ..errors import LowtideError
from .purity import Purity

__all__ = ["Closed", "graph_number"]


class Closed:
    """The closed-over tensors of a scan that need gradients, and what is differentiated in their place."""

    def __init__(self, tensors: Iterable[torch.Tensor], purity: Purity) -> None:
        self.purity = purity
        self.tensors: list[torch.Tensor] = []
        self.stand_ins: list[torch.Tensor] = []
        self.held: list[torch.Tensor] = []
        self.known: dict[int, torch.Tensor] = {}
        self.read: set[int] = set()
        self.found: list[int] = []
        self.any_replaced = self.all_wanted = False
        self.reading: _Reading | None = None
        for tensor in tensors:
            self.add(tensor)

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        """Take a tensor in, if it needs a gradient; returns what stands for it."""
        if not tensor.requires_grad:
            return tensor
        if id(tensor) not in self.known:
            given = self.as_seen_here(tensor)
            stand_in = given if given.grad_fn is None else given.detach().requires_grad_()
            self.any_replaced |= stand_in is not tensor
            self.known |= {id(tensor): stand_in, id(given): stand_in, id(stand_in): stand_in}
            self.held.append(tensor)
            self.tensors.append(given)
            self.stand_ins.append(stand_in)
        return self.known[id(tensor)]

    def as_seen_here(self, tensor: torch.Tensor) -> torch.Tensor:
        """What stands for a tensor in the scans around this one."""
        for reading in _readings():
            if reading.closed is not self:
                tensor = reading.swap(tensor)
        return tensor

    def with_leaves_of_its_own(self) -> Closed:
        """The same tensors with new leaves to differentiate: those belong to the stream that reads them."""
        twin = copy.copy(self)
        leaves = {id(old): old.detach().requires_grad_() for old in self.stand_ins}
        twin.stand_ins = list(leaves.values())
        twin.known = {key: leaves[id(old)] for key, old in self.known.items()}
        twin.known |= {id(leaf): leaf for leaf in twin.stand_ins}
        twin.read = {id(leaves[key]) for key in self.read}
        twin.found, twin.reading, twin.any_replaced = [], None, True
        return twin

    def refuse_others(self, made: Iterable[Any], start: int, inside: Iterable[Any]) -> None:
        """Refuse a graph that leads elsewhere than to the leaves that are differentiated."""
        allowed = {id(leaf) for leaf in (*self.stand_ins, *inside)}
        for end in ends_of(made, start):
            if id(_tensor(end)) not in allowed:
                raise RuntimeError("it reads a tensor in a way that torch does not show")

    def note(self, made: Iterable[Any], start: int, inside: Iterable[Any]) -> None:
        """Take in what the graph of the first unit leads to, and remember that it was read."""
        known = {id(thing) for thing in inside}
        for end in ends_of(made, start):
            tensor = _tensor(end)
            if id(tensor) not in known:
                self.read.add(id(self.add(tensor)))

    def check(self, made: Iterable[Any], start: int, inside: Iterable[Any]) -> Iterator[torch.Tensor]:
        """Remember what else the graph of a later unit leads to; gives the tensors that are not known."""
        known = {id(thing) for thing in inside}
        for end in ends_of(made, start):
            tensor = _tensor(end)
            if id(tensor) in self.known:
                self.read.add(id(self.known[id(tensor)]))
            elif id(tensor) not in known:
                yield tensor

    @property
    def places(self) -> list[int]:
        """The places of the tensors that some unit led to so far, or of all."""
        if self.all_wanted:
            return list(range(len(self.stand_ins)))
        if len(self.found) != len(self.read):
            self.found = [place for place, tensor in enumerate(self.stand_ins) if id(tensor) in self.read]
        return self.found

    def finding(self, inside: Iterable[Any]) -> AbstractContextManager[Any]:
        """A context in which tensors that functions of torch read from outside are taken in."""
        return _Reading(self, {id(thing) for thing in inside})

    def standing_in(self) -> AbstractContextManager[Any]:
        """A context in which functions of torch read the stand-ins."""
        if not self.any_replaced:
            return nullcontext()
        self.reading = self.reading or _Reading(self, None)  # one for all: compiled cells are made for it
        return self.reading

    def minding(self) -> AbstractContextManager[Any]:
        """The same for the second unit, which may not read what the first has left behind."""
        return _Reading(self, None, minds=True) if self.purity.made else self.standing_in()

    @contextmanager
    def without_hooks(self) -> Iterator[None]:
        """A context in which the gradients of units do not go through the hooks of closed-over tensors."""
        hooked = [
            (tensor, private_of(tensor, "backward_hooks"))
            for tensor in self.stand_ins
            if private_of(tensor, "backward_hooks")
        ]
        try:
            for tensor, _ in hooked:
                set_private(tensor, "backward_hooks", None)
            yield
        finally:
            for tensor, hooks in hooked:
                set_private(tensor, "backward_hooks", hooks)


class _Reading(TorchFunctionMode):
    """Hands stand-ins to functions of torch, and finds more closed-over tensors unless inside is None."""

    def __init__(self, closed: Closed, inside: set[int] | None, *, minds: bool = False) -> None:
        super().__init__()
        self.closed, self.inside = closed, inside
        self.minds = minds or inside is not None
        self.start = graph_number()
        self.swap_all = functools.partial(private("tree_map_only"), torch.Tensor, self.swap)

    def __enter__(self) -> _Reading:
        _around.readings = (*_readings(), self)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _around.readings = _readings()[:-1]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        swap, kwargs = self.swap_all, kwargs or {}
        if not self.minds:
            return func(*swap(args), **swap(kwargs))
        self.closed.purity.before(func, args, kwargs)
        result = func(*swap(args), **swap(kwargs))
        self.closed.purity.after(args, kwargs, result)
        return result

    def swap(self, tensor: torch.Tensor) -> torch.Tensor:
        known = self.closed.known.get(id(tensor))
        if known is not None:
            return known
        return self.closed.add(tensor) if self.is_outside(tensor) else tensor

    def is_outside(self, tensor: torch.Tensor) -> bool:
        if self.inside is None or id(tensor) in self.inside or not tensor.requires_grad:
            return False
        return tensor.grad_fn is not None and private_of(tensor.grad_fn, "sequence_number")() < self.start


_around = threading.local()


def _readings() -> tuple[_Reading, ...]:
    return getattr(_around, "readings", ())


_leaf = torch.ones(0, requires_grad=True)


def graph_number() -> int:
    """The number of the newest node of autograd's graph."""
    with torch.enable_grad():
        node = _leaf.view_as(_leaf).grad_fn
    assert node is not None
    return private_of(node, "sequence_number")()  # type: ignore[no-any-return]


def ends_of(made: Iterable[Any], start: int) -> Iterator[Any]:
    """What a graph leads to from some edges: tensors, or nodes that are older than `start`.

    The walk goes on past the cast of a parameter that autocast has kept.
    """
    seen = set()
    todo = [edge.node for edge in made if edge is not None]
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        elif private_of(node, "sequence_number")() < start and node.name() != "ToCopyBackward0":
            yield node
        else:
            todo += [following for following, _ in node.next_functions if following is not None]


def _tensor(end: Any) -> torch.Tensor:
    if isinstance(end, torch.Tensor):
        return end
    raise LowtideError(
        f"the cell reads the result of another computation ({end.name()}) in a way that lowtide.scan cannot "
        "see; hand that tensor over in xs, in init or in the carry"
    )
