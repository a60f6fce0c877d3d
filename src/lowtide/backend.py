"""`torch.compile(model, backend="lowtide", options={"budget": "8GiB"})`.

Registered in the entry-point group `torch_dynamo_backends`. Shapes that torch.compile traced symbolically
are planned one by one, as they come, and so are Python floats that it hands over as tensors.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from .capture import Piece
from .errors import LowtideError
from .options import Options
from .say import say_plan
from .stepped import changes, look_at_steps

__all__ = ["lowtide"]


def lowtide(
    module: torch.fx.GraphModule,
    inputs: list[Any],
    *,
    options: dict[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """The backend: plans and runs what torch.compile captured."""
    if mode not in (None, "default"):
        raise LowtideError(f'mode={mode!r} means nothing to backend="lowtide"; leave it out')
    chosen = dict(options or {})
    if "budget" not in chosen and "plan" not in chosen:
        raise LowtideError('backend="lowtide" needs options={"budget": ...}, as in {"budget": "8GiB"}')
    made = Options.make(chosen.pop("budget", None), **chosen)
    if any(isinstance(item, torch.SymInt) for item in inputs) or _floats(module):
        return _PerShape(module, made)
    return _compile(module, inputs, made)


def _compile(module: torch.fx.GraphModule, inputs: Any, options: Options) -> Callable[..., Any]:
    """The module as planned, and as planned again where optimizer state comes that does not fit."""
    piece = Piece(options)
    run = piece.compile(module, inputs)
    if piece.plan is None:
        return run
    say_plan(piece.plan)
    if piece.plan.budget is None:
        return run
    return _Again(module, options, piece, run)


class _Again:
    """A planned module that is planned again when optimizer state has come that does not fit beside it."""

    def __init__(
        self, module: torch.fx.GraphModule, options: Options, piece: Piece, run: Callable[..., Any]
    ) -> None:
        self.module, self.options, self.piece, self.run = module, options, piece, run
        self.looked = changes()
        look_at_steps(self)

    def __call__(self, *args: Any) -> Any:
        if self.looked != changes():
            self.looked = changes()
            if self.outgrown():
                self.piece = Piece(self.options)
                self.run = self.piece.compile(self.module, args)
        return self.run(*args)

    def outgrown(self) -> bool:
        """Whether the state that is there now does not fit beside the plan."""
        plan = self.piece.plan
        if plan is None or plan.budget is None:
            return False
        return plan.peak + self.piece.uncounted_state() > plan.budget


class _PerShape:
    """A module with symbolic shapes or floats: compiled for each set of them that it is called with."""

    def __init__(self, module: torch.fx.GraphModule, options: Options) -> None:
        self.module = module
        self.options = options
        self.floats = _floats(module)
        self.compiled: OrderedDict[tuple[Any, ...], Callable[..., Any]] = OrderedDict()

    def __call__(self, *given: Any) -> Any:
        args = tuple(a.item() if index in self.floats else a for index, a in enumerate(given))
        key = tuple((a.shape, a.dtype) if isinstance(a, torch.Tensor) else a for a in args)
        if key not in self.compiled:
            if len(self.compiled) >= self.options.max_plans:
                self.compiled.popitem(last=False)
            self.compiled[key] = self.compile(args)
        self.compiled.move_to_end(key)
        return self.compiled[key](*_tensors(args))

    def compile(self, args: tuple[Any, ...]) -> Callable[..., Any]:
        """The module with its sizes and floats written in as numbers."""
        module = copy.deepcopy(self.module)
        for node, value in zip(module.graph.find_nodes(op="placeholder"), args, strict=True):
            if not isinstance(value, torch.Tensor):
                for holder in (*(user for user in node.users if user.target == "item"), node):
                    for user in list(holder.users):
                        _write_in(user, holder, value)
                    module.graph.erase_node(holder)
        module.recompile()
        return _compile(module, _tensors(args), self.options)


def _floats(module: fx.GraphModule) -> set[int]:
    """The places of inputs that are numbers: tensors of which the graph reads nothing else."""
    nodes = module.graph.find_nodes(op="placeholder")
    return {index for index, node in enumerate(nodes) if {user.target for user in node.users} == {"item"}}


def _write_in(user: fx.Node, symbol: fx.Node, value: float) -> None:
    """Replace a symbolic size or float in a node's arguments by its number."""
    user.args, user.kwargs = fx.map_arg(  # type: ignore[assignment]
        (user.args, user.kwargs), lambda argument: value if argument is symbol else argument
    )


def _tensors(args: tuple[Any, ...]) -> list[Any]:
    return [arg for arg in args if isinstance(arg, torch.Tensor)]
