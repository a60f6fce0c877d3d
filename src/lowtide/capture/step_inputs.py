"""The inputs of a captured step: what each of them is, which of them train, and the memory behind them."""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .._torch import is_view
from ..errors import CaptureError
from .awaited import NOBODY, Awaited, awaited, in_bucket

__all__ = ["StepInputs"]


@dataclass(frozen=True)
class StepInputs:
    """The inputs of a captured graph, by their places.

    `roles` are "parameter", "buffer" and "input"; `leaves` get a gradient in `.grad`, and have one already
    where they are `accumulating`; `trained` refers to the leaves themselves; `storages` are the bytes of what
    each input looks at; `cast_once` are the leaves whose casts autocast keeps; `awaited` says for whose
    gradients somebody waits during the backward; `names` are what a user calls the inputs.
    """

    roles: tuple[str, ...] = ()
    leaves: frozenset[int] = frozenset()
    accumulating: frozenset[int] = frozenset()
    trained: tuple[weakref.ref[torch.Tensor], ...] = ()
    storages: tuple[int, ...] = ()
    cast_once: frozenset[int] = frozenset()
    awaited: Awaited = NOBODY
    names: tuple[str, ...] = ()

    @classmethod
    def of(cls, module: fx.GraphModule, inputs: Sequence[Any]) -> StepInputs:
        """The inputs that torch hands over with a graph; refuses those that no plan can be made for."""
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
            storages=tuple(map(_storage_bytes, inputs)),
            cast_once=frozenset(index for index, item in leaves.items() if _autocast_keeps(item)),
            awaited=awaited(leaves),
            names=tuple(
                _name(str(node.target), _role(node, item)) for node, item in zip(nodes, inputs, strict=True)
            ),
        )

    def present_gradients(self) -> Iterator[int]:
        """The bytes of the gradients that are there."""
        for leaf in (ref() for ref in self.trained):
            if leaf is not None and leaf.grad is not None and _holds_gradient(leaf):
                yield leaf.grad.numel() * leaf.grad.element_size()

    def widen(self, primals: Sequence[fx.Node]) -> None:
        """Let fake inputs be as large as what they look at: torch traces some parts as if they were all."""
        tokens = len(primals) - len(self.storages)
        if tokens < 0:  # torch merged inputs that look at the same storage
            return
        for primal, size in zip(primals[tokens:], self.storages, strict=True):
            if _storage_bytes(primal.meta["val"]) < size:
                primal.meta["val"].untyped_storage().resize_(size)


def _refuse(inputs: Sequence[Any]) -> None:
    if any(isinstance(item, torch.SymInt) for item in inputs):
        raise CaptureError(
            "a plan is made for fixed shapes, but torch.compile traced this step with symbolic ones; "
            "compile with dynamic=False, or use lowtide.cap, which keeps a plan per shape"
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


def _storage_bytes(item: Any) -> int:
    strided = isinstance(item, torch.Tensor) and item.layout == torch.strided
    return item.untyped_storage().nbytes() if strided else 0
