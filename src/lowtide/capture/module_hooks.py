"""Full backward hooks of modules (`register_full_backward_hook`, `..._pre_hook`) in a captured step.

In a trace of the backward an operator stands where autograd would call the hooks of a module. It runs once
in a step, with the gradients themselves, and hands on what the hooks return: new tensors, since a hook may
keep what it sees. So what hooks have seen or made is never overwritten. What a hook takes for itself is in no
plan.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.hooks import BackwardHook

from .._torch import module_hooks_traced, private_of
from ..errors import CaptureError, UnsupportedBackward

__all__ = ["calls_hooks", "hooks_followed", "let_hooks_be_called", "run_hooks"]

Gradients = Sequence[Tensor | None]

_sites: weakref.WeakValueDictionary[int, Hooks] = weakref.WeakValueDictionary()
_numbers = itertools.count()


class Hooks:
    """The hooks that a module has when it is traced."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.full = tuple(private_of(module, "get_backward_hooks")()[0])
        self.before = tuple(private_of(module, "get_backward_pre_hooks")())

    def __repr__(self) -> str:
        """As an expression: torch writes the code of graphs that it stands in."""
        return f"Hooks({self.names!r})"

    @property
    def names(self) -> str:
        """What the functions are called."""
        return ", ".join(getattr(hook, "__qualname__", "a hook") for hook in (*self.before, *self.full))

    def traced(self) -> BackwardHook:
        """Torch's object of hooks for one call of the module; in a trace they are operators."""
        number = next(_numbers)
        _sites[number] = self

        def before(_: Any, outgoing: Gradients) -> Gradients:
            return _traced(number, outgoing, None)

        def full(_: Any, incoming: Gradients, outgoing: Gradients) -> Gradients | None:
            found = _traced(number, incoming, outgoing)
            return found if any(gradient is not None for gradient in incoming) else None

        return BackwardHook(None, (full,) * bool(self.full), (before,) * bool(self.before))


def hooks_followed() -> AbstractContextManager[Any]:
    """Let modules with such hooks be captured, in this thread."""
    return module_hooks_traced(_node_target)


def _node_target(module: nn.Module) -> Callable[[], BackwardHook]:
    hooks = Hooks(module)

    def hooks_of_a_module() -> BackwardHook:
        return hooks.traced()

    return hooks_of_a_module


def _traced(number: int, gradients: Gradients, outgoing: Gradients | None) -> tuple[Tensor | None, ...]:
    """The operator of one call of hooks: the gradients that they may change come first."""
    there = [gradient for gradient in gradients if gradient is not None]
    if any(gradient.requires_grad for gradient in there):
        raise CaptureError(
            f"a backward hook of a module ({_sites[number].names}) stands in a gradient that the step "
            "computes with create_graph=True and differentiates again; take the hook away for such steps"
        )
    seen = [gradient for gradient in outgoing or () if gradient is not None]
    places = [
        [place for place, each in enumerate(of) if each is not None] for of in (gradients, outgoing or ())
    ]
    counts = [len(gradients), -1 if outgoing is None else len(outgoing)]
    made = iter(torch.ops.lowtide.module_hooks(there, seen, *places, counts, number))
    return tuple(None if gradient is None else next(made) for gradient in gradients)


def let_hooks_be_called(graph: fx.Graph, *, compiled: bool) -> None:
    """Let the operators of a trace call the hooks that they stand for."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.lowtide.module_hooks.default):
        hooks = _sites[node.args[-1]]
        if compiled:
            raise CaptureError(
                f"a backward hook of a module ({hooks.names}) cannot be called by compiled code; the default "
                'executor, executor="eager", calls them'
            )
        node.target, node.args = run_hooks, (hooks, *node.args[:-1])


def calls_hooks(node: fx.Node) -> bool:
    """Whether a node calls hooks of the user's."""
    return node.target is run_hooks


def run_hooks(
    hooks: Hooks,
    gradients: list[Tensor],
    seen: list[Tensor],
    places: list[int],
    seen_places: list[int],
    counts: list[int],
) -> list[Tensor]:
    """Call the hooks of a module as torch does, and hand on what they return."""
    present = _spread(gradients, places, counts[0])
    outgoing = None if counts[1] < 0 else _spread(seen, seen_places, counts[1])
    called, kind = hooks.full, "hook returned an invalid number of grad_input"
    if outgoing is None:
        called, kind = hooks.before, "pre hook returned an invalid number of grad_output"
    for hook in called:
        returned = hook(hooks.module, present, *([] if outgoing is None else [outgoing]))
        if returned is not None:
            if len(returned) != len(present):
                raise RuntimeError(f"Backward {kind}, got {len(returned)}, but expected {len(present)}")
            present = tuple(returned)
    shown = {each.untyped_storage().data_ptr() for each in (*gradients, *seen)}
    return [_own(present[place], given, shown) for place, given in zip(places, gradients, strict=True)]


def _spread(tensors: list[Tensor], places: list[int], count: int) -> tuple[Any, ...]:
    found: list[Tensor | None] = [None] * count
    for place, tensor in zip(places, tensors, strict=True):
        found[place] = tensor
    return tuple(found)


def _own(made: Any, given: Tensor, shown: set[int]) -> Tensor:
    """A gradient as the step's own tensor: a copy of one that is somebody else's, or part of another."""
    if not isinstance(made, Tensor) or made.shape != given.shape:
        what = f"one of the shape {tuple(made.shape)}" if isinstance(made, Tensor) else repr(made)
        raise UnsupportedBackward(
            f"a backward hook of a module returned {what} for a gradient of the shape {tuple(given.shape)}; "
            "in a capped step it may return others of the same shape, or None for all of them"
        )
    made = made.detach().to(given.dtype)
    storage = made.untyped_storage()
    alone = storage.data_ptr() not in shown and storage.nbytes() == made.nbytes
    return made if alone else _copied(made)


def _copied(tensor: Tensor) -> Tensor:
    """A copy that lies in memory as a tensor does, also where that is expanded."""
    tensor = tensor.resolve_conj().resolve_neg()
    reach = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    flat = tensor.as_strided((reach if tensor.numel() else 0,), (1,)).clone()
    return flat.as_strided(tensor.shape, tensor.stride(), 0)


def _not_alone(*_: Any) -> list[Tensor]:
    raise CaptureError("hooks of modules run in a captured step alone")


def _empty(gradients: list[Tensor], *_: Any) -> list[Tensor]:
    return [
        torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device=each.device)
        for each in gradients
    ]


torch.library.define(
    "lowtide::module_hooks",
    "(Tensor[] gradients, Tensor[] seen, int[] places, int[] seen_places, int[] counts, int number)"
    " -> Tensor[]",
)
torch.library.impl("lowtide::module_hooks", ("cpu", "cuda"), _not_alone)
torch.library.register_fake("lowtide::module_hooks", _empty)
fx.node.has_side_effect(torch.ops.lowtide.module_hooks.default)
