"""The inputs of a captured step: what each of them is, which of them train, and the memory behind them."""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from .._torch import inner_tensors, is_made_of_others, is_view, place_of
from ..errors import CaptureError
from .awaited import NOBODY, Awaited, awaited, in_bucket
from .stepped import stepped

__all__ = ["StepInputs"]


@dataclass(frozen=True)
class StepInputs:
    """The inputs of a captured graph, by their places.

    `roles` are "parameter", "buffer" and "input"; `leaves` get a gradient in `.grad`, and have one already
    where they are `accumulating`; `trained` refers to the leaves themselves; `storages` are the bytes of what
    each input looks at, by the attributes that lead to its tensors; `cast_once` are the leaves whose casts
    autocast keeps; `awaited` says for whose gradients somebody waits during the backward; `stepped` are the
    leaves that an optimizer updates inside of it; `names` are what a user calls the inputs; `wrapped` are
    those made of other tensors, as a DTensor is of its local one; `shapes` are dtypes and shapes as a user
    sees them, of a DTensor the whole; `asked_of` are those that are looked at before the step runs
    (`conditions`).
    """

    roles: tuple[str, ...] = ()
    leaves: frozenset[int] = frozenset()
    accumulating: frozenset[int] = frozenset()
    trained: tuple[weakref.ref[torch.Tensor], ...] = ()
    storages: tuple[dict[tuple[str, ...], int], ...] = ()
    cast_once: frozenset[int] = frozenset()
    awaited: Awaited = NOBODY
    stepped: frozenset[int] = frozenset()
    names: tuple[str, ...] = ()
    wrapped: frozenset[int] = frozenset()
    shapes: tuple[str, ...] = ()
    asked_of: frozenset[int] = frozenset()

    @classmethod
    def of(
        cls,
        module: fx.GraphModule,
        inputs: Sequence[Any],
        *,
        asked_of: Sequence[int] = (),
        optimizers: Sequence[Any] = (),
    ) -> StepInputs:
        """The inputs that torch hands over with a graph; refuses those that no plan can be made for.

        The optimizers are those that step inside of the backward.
        """
        _refuse(inputs)
        nodes = module.graph.find_nodes(op="placeholder")
        leaves = {
            index: item
            for index, item in enumerate(inputs)
            if isinstance(item, torch.Tensor) and item.is_leaf and item.requires_grad
        }
        return cls(
            roles=tuple(_role(node, item) for node, item in zip(nodes, inputs, strict=True)),
            leaves=frozenset(leaves),
            accumulating=frozenset(index for index, item in leaves.items() if _holds_gradient(item)),
            trained=tuple(map(weakref.ref, leaves.values())),
            storages=tuple(map(_storages, inputs)),
            cast_once=frozenset(index for index, item in leaves.items() if _autocast_keeps(item)),
            awaited=awaited(leaves),
            stepped=stepped(inputs, leaves, optimizers),
            names=tuple(
                _name(str(node.target), _role(node, item)) for node, item in zip(nodes, inputs, strict=True)
            ),
            wrapped=frozenset(index for index, item in enumerate(inputs) if is_made_of_others(item)),
            shapes=tuple(map(_shape, inputs)),
            asked_of=frozenset(asked_of),
        )

    def present_gradients(self) -> Iterator[int]:
        """The bytes of the gradients that are there."""
        for ref in self.trained:
            yield from _gradient_bytes(ref())

    def present_wrapped_gradients(self) -> Iterator[int]:
        """The bytes of those that are made of other tensors, which autograd adds to by itself."""
        for tensor in (ref() for ref in self.trained):
            if is_made_of_others(tensor):
                yield from _gradient_bytes(tensor)

    def places(self, primals: Sequence[fx.Node]) -> list[tuple[int, tuple[str, ...]] | None]:
        """For each primal the input that it stands for, and the attributes that lead to it there.

        None for the tokens that torch puts in front, one for each kind of effect. Of an input that is made of
        other tensors there is a primal for each of them. Empty where torch merged inputs.
        """
        tokens = len(primals) - len(self.roles)
        if self.wrapped:
            found = [place_of(primal) for primal in primals]
            return found if {at[0] for at in found if at} == set(range(len(self.roles))) else []
        if tokens < 0:
            return []
        return [None if index < tokens else (index - tokens, ()) for index in range(len(primals))]

    def by_primal(self, primals: Sequence[fx.Node]) -> StepInputs:
        """The same for each primal that is no token; nothing where torch merged some."""
        if not self.wrapped:
            return self if len(primals) >= len(self.roles) else StepInputs()
        places = [at for at in self.places(primals) if at is not None]

        def primals_of(indices: frozenset[int]) -> frozenset[int]:
            return frozenset(primal for primal, (place, _) in enumerate(places) if place in indices)

        return replace(
            self,
            roles=tuple(self.roles[place] for place, _ in places),
            leaves=primals_of(self.leaves),
            accumulating=primals_of(self.accumulating - self.wrapped),
            storages=tuple({(): self.storages[place].get(path, 0)} for place, path in places),
            cast_once=primals_of(self.cast_once),
            awaited=NOBODY,
            stepped=frozenset(),
            names=tuple(self.names[place] for place, _ in places),
            wrapped=frozenset(),
        )

    def looked_at(self, primals: Sequence[fx.Node]) -> set[fx.Node]:
        """The primals that are looked at before the step runs."""
        places = zip(primals, self.places(primals), strict=False)
        return {primal for primal, at in places if at is not None and at[0] in self.asked_of}

    def widen(self, primals: Sequence[fx.Node]) -> None:
        """Let fake inputs be as large as what they look at: torch traces some parts as if they were all."""
        for primal, at in zip(primals, self.places(primals), strict=False):
            size = 0 if at is None else self.storages[at[0]].get(at[1], 0)
            if _storage_bytes(primal.meta["val"]) < size:
                primal.meta["val"].untyped_storage().resize_(size)


def _gradient_bytes(tensor: torch.Tensor | None) -> Iterator[int]:
    if tensor is None or not _holds_gradient(tensor):
        return
    for gradient in inner_tensors(getattr(tensor, "grad", None)).values():
        yield gradient.numel() * gradient.element_size()


def _refuse(inputs: Sequence[Any]) -> None:
    if any(isinstance(item, torch.SymInt) for item in inputs):
        raise CaptureError(
            "a plan is made for fixed shapes, but torch.compile traced this step with symbolic ones: a "
            "tensor inside of an argument may be marked (torch._dynamo.mark_dynamic). Pass it by itself, "
            "in a list or in a dict, or leave it unmarked: lowtide.cap sees by itself which sizes change"
        )
    if any(isinstance(item, torch.Tensor) and item.is_meta for item in inputs):
        raise CaptureError(
            "the step has tensors on the meta device, where some operators have no derivative: its trace "
            "would lack part of the backward. lowtide.plan takes a module on the meta device and its "
            "batch; a function, or a step that runs, needs tensors on a device"
        )


def _role(node: fx.Node, item: Any) -> str:
    if isinstance(item, torch.nn.Parameter):
        return "parameter"
    return "buffer" if "_buffers_" in node.name else "input"


def _holds_gradient(leaf: torch.Tensor) -> bool:
    """Whether a leaf has a gradient that takes bytes of its own."""
    return leaf.grad is not None and not in_bucket(leaf.grad)


def _shape(item: Any) -> str:
    if not isinstance(item, torch.Tensor):
        return type(item).__name__
    return f"{str(item.dtype).removeprefix('torch.')}{list(item.shape)}"


def _autocast_keeps(leaf: torch.Tensor) -> bool:
    """Whether eager keeps a leaf's cast until autocast ends (ATen/autocast_mode.cpp, 2.11-2.13)."""
    return leaf.dtype == torch.float32 and not is_view(leaf)


_PARTS = re.compile("_(?:modules|parameters|buffers)_")


def _name(target: str, role: str) -> str:
    """What a user calls an input, from torch's name of it (`L_self_modules_0_parameters_weight_`)."""
    owner, *path = _PARTS.split(target.removesuffix("_"))
    if path:
        return f"the {role} {'.'.join(path)}"
    word = owner.rpartition("cell_contents_")[2].removeprefix("L_")
    kind, _, rest = word.partition("_")
    if kind == "args" and rest:
        return f"the argument {rest}" if not rest.isdecimal() else f"argument {rest}"
    return f"the {role} {rest if kind == 'kwargs' and rest else word}"


def _storages(item: Any) -> dict[tuple[str, ...], int]:
    return {path: _storage_bytes(tensor) for path, tensor in inner_tensors(item).items()}


def _storage_bytes(item: Any) -> int:
    strided = isinstance(item, torch.Tensor) and item.layout == torch.strided
    return item.untyped_storage().nbytes() if strided else 0
