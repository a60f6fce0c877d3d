"""What a cell may not do, as a step that is recomputed must do the same.

While the first unit runs, before any harm is done, are refused: changes in place to the carry, to an input
and to whatever can be reached from the cell (the running statistics of BatchNorm), and random numbers from a
generator of the cell's own. In the second unit, reading a tensor that the first made of its carry and its
inputs and left behind (`self.previous = h`) is refused. When all units have run, and when the backward
begins, whatever can be reached from the cell must be as it was.

Limits: counters and other Python values that a cell changes are not noticed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any
from weakref import ref

import torch

from .._torch import private, private_of, storage_key
from ..errors import LowtideError

__all__ = ["Purity", "changed_in_place"]

_IN_PLACE = re.compile(
    r"(?!requires_grad_$)[a-z]\w*[^_]_|__setitem__|__i(add|sub|mul|div|truediv|floordiv|mod|pow|and|or|xor|lshift|rshift)__"
)


class Purity:
    """Watches a cell: `named` is what can be reached from it, `inputs` its first carry and its inputs."""

    def __init__(self, named: Iterable[tuple[str, torch.Tensor]], inputs: Iterable[Any]) -> None:
        self.named = [(name, tensor, private_of(tensor, "version")) for name, tensor in named]
        self.inputs = {key for leaf in inputs for key in _storages([leaf])}
        self.reached = {key: name for name, tensor, _ in self.named for key in _storages([tensor])}
        self.made: dict[int, ref[torch.Tensor]] = {}
        self.handed: list[Any] = [*inputs]
        self.later = False
        self.leaves = private("tree_leaves")
        self.note(self.handed)

    def tensors(self, tree: Any) -> list[torch.Tensor]:
        return [leaf for leaf in self.leaves(tree) if isinstance(leaf, torch.Tensor)]

    def before(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Look at a call of a function of torch."""
        if self.later:
            return self.refuse_left_behind(args, kwargs)
        if isinstance(kwargs.get("generator"), torch.Generator):
            raise LowtideError(
                "the cell draws random numbers from a generator of its own, whose state a scan does not "
                "keep; let it draw from torch's own, or hand the numbers over in xs"
            )
        for key in _storages(_written(getattr(func, "__name__", ""), args, kwargs)):
            if key in self.inputs:
                raise changed_in_place()
            if key in self.reached:
                raise _changes(self.reached[key])
        return None

    def after(self, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        """Remember what was made of the carry and the inputs."""
        if not self.later and any(self.is_made(leaf) for leaf in self.tensors((args, kwargs))):
            self.note(self.tensors(result))

    def note(self, leaves: Iterable[Any]) -> None:
        self.made |= {id(leaf): ref(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)}

    def is_made(self, tensor: torch.Tensor) -> bool:
        known = self.made.get(id(tensor))
        return known is not None and known() is tensor

    def first_is_over(self, carry: Iterable[Any]) -> None:
        """The first unit has run and hands its carry on."""
        self.check()
        self.later = True
        self.made = {key: known for key, known in self.made.items() if known() is not None}
        for leaf in (*self.handed, *carry):
            self.made.pop(id(leaf), None)
        self.handed = []

    def refuse_left_behind(self, *read: Any) -> None:
        for tensor in self.tensors(read):
            if self.is_made(tensor):
                raise LowtideError(
                    f"the cell reads a tensor of shape {tuple(tensor.shape)} that its first step made and "
                    "left behind; a recomputed step would find another there. Hand it on in the carry"
                )

    def check(self) -> None:
        """Refuse a cell that has changed what can be reached from it."""
        for name in self.changed():
            raise _changes(name)

    def check_later(self) -> None:
        """Refuse a backward if something was changed since the forward."""
        for name in self.changed():
            raise LowtideError(
                f"{name}, which the cell of a scan can reach, was changed in place between the scan and its "
                "backward, in which steps are recomputed; change it after the backward"
            )

    def changed(self) -> Iterator[str]:
        return (name for name, tensor, version in self.named if private_of(tensor, "version") != version)


def changed_in_place() -> LowtideError:
    """What is said to a cell that changes its inputs."""
    return LowtideError(
        "the cell changes its carry or its input in place; a recomputed step would start from the "
        "changed values. Write h = h + 1 instead of h += 1 or h.add_(1), or clone it first"
    )


def _changes(name: str) -> LowtideError:
    return LowtideError(
        f"the cell changes {name} in place; a recomputed step would change it twice. Put it into the "
        "carry, or leave it alone (BatchNorm: eval() or track_running_stats=False)"
    )


def _written(name: str, args: Any, kwargs: dict[str, Any]) -> list[Any]:
    """What a call changes in place."""
    if name == "batch_norm":
        return list(args[1:3]) if kwargs.get("training") else []
    if name == "instance_norm":
        return (
            [kwargs.get("running_mean"), kwargs.get("running_var")] if kwargs.get("use_input_stats") else []
        )
    changes = kwargs.get("inplace") is True or _IN_PLACE.fullmatch(name) is not None
    out = kwargs.get("out")
    return [*(args[:1] if changes else ()), *(out if isinstance(out, tuple | list) else (out,))]


def _storages(leaves: Iterable[Any]) -> Iterator[int]:
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided:
            yield storage_key(leaf)
