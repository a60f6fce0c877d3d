"""A scan as one function of autograd: its inputs are init, xs and what the cell closes over."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Several
from typing import Any, NamedTuple

import torch

from ..errors import UnsupportedBackward
from .loop import Loop
from .record import Gradients
from .sequence import detached

__all__ = ["apply"]


def apply(loop: Loop, init: list[Any], xs: Several[torch.Tensor]) -> tuple[list[Any], list[Any]]:
    """Run a scan: the last carry and the outputs, with gradients to come."""
    state = _State(loop, init)
    starts = [leaf for leaf in init if isinstance(leaf, torch.Tensor)]
    made = iter(_Scan.apply(state, *starts, *xs, *loop.closed.tensors))  # type: ignore[no-untyped-call]
    carry, values = state.take_results()
    return _filled(carry, made), _filled(values, made)


class _Like(NamedTuple):
    """A leaf of the last carry, without its numbers."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    flows: bool

    def tangent(self, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Its gradient, also where nobody read it: the bytes of a backward do not depend on that."""
        if gradient is not None or not self.flows:
            return gradient
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)


class _State:
    """What the forward and the backward share; `carry` and `values` say which leaves are tensors."""

    def __init__(self, loop: Loop, init: list[Any]) -> None:
        self.loop: Loop | None = loop
        self.init = init
        self.starts = [isinstance(leaf, torch.Tensor) for leaf in init]
        self.results: tuple[list[Any], list[Any]] = ([], [])
        self.carry: list[_Like | None] = []
        self.values: list[bool] = []

    def take_results(self) -> tuple[list[Any], list[Any]]:
        """The last carry and the outputs; they are not held here any longer."""
        results, self.results = self.results, ([], [])
        return results


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, state: _State, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        assert state.loop is not None
        init = [detached(leaf) for leaf in state.init]
        state.init = []
        carry, values = state.loop.forward(init)
        flows = [*state.loop.flows.carry, *state.loop.flows.outputs]
        state.results = carry, values
        state.carry = [_like(leaf, on) for leaf, on in zip(carry, flows, strict=False)]
        state.values = [isinstance(leaf, torch.Tensor) for leaf in values]
        made = [
            (leaf, on)
            for leaf, on in zip((*carry, *values), flows, strict=True)
            if isinstance(leaf, torch.Tensor)
        ]
        ctx.mark_non_differentiable(*(leaf for leaf, on in made if not on))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)  # for autograd to notice those that are changed before the backward
        ctx.state = state
        return tuple(leaf for leaf, _ in made)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        _refuse_create_graph()
        state, _ = ctx.state, ctx.saved_tensors
        loop, state.loop = state.loop, None
        if loop is None:
            raise UnsupportedBackward(
                "this scan has gone backward already, and what it kept is used up; retain_graph=True is not "
                "supported. Sum the losses before one backward(), or run the scan once for each"
            )
        given = iter(gradients)
        of_carry = [leaf.tangent(next(given)) if leaf else None for leaf in state.carry]
        of_values: Gradients = [next(given) if is_tensor else None for is_tensor in state.values]
        del given, gradients
        starts, xs, closed = loop.backward(of_carry, of_values)
        return (None, *(part for part, on in zip(starts, state.starts, strict=True) if on), *xs, *closed)


def _filled(leaves: list[Any], tensors: Iterator[torch.Tensor]) -> list[Any]:
    return [next(tensors) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


def _like(leaf: Any, flows: bool) -> _Like | None:
    return _Like(leaf.shape, leaf.dtype, leaf.device, flows) if isinstance(leaf, torch.Tensor) else None


def _refuse_create_graph() -> None:
    if torch.is_grad_enabled():
        raise UnsupportedBackward(
            "the backward of a scan was called with create_graph=True, for a second derivative; what a scan "
            "keeps is enough for one backward. Leave out budget= and slots=: autograd then sees a plain loop"
        )
