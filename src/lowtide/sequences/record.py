"""A unit that was run with its backward in mind: what autograd saved of it, and how to go back through it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Several
from contextlib import AbstractContextManager, nullcontext
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from .._torch import private, private_of
from ..torch_state.autocast_state import State, switched_to
from .purity import changed_in_place
from .sequence import Cut, Piece, Sequence, detached, differentiable

__all__ = ["Flows", "Gradients", "Record", "is_whole", "versions"]

Gradients = list[torch.Tensor | None]


class Flows(NamedTuple):
    """Which leaves gradients flow to: of the carry that a unit hands on, and of its outputs.

    `ever` is for the carries of all units so far.
    """

    carry: list[bool]
    outputs: list[bool]
    ever: tuple[bool, ...] = ()

    def then(self, other: Flows) -> Flows:
        """Those of all units so far: the carry is the last one's, outputs are of them all."""
        return Flows(
            other.carry, [*_either(self.outputs, other.outputs)], (*_either(self.ever, other.carry),)
        )

    def gradients_to_hold(self, carry: Gradients) -> Gradients:
        """The gradients of a carry without those of leaves to which none flows from any unit (carry = x)."""
        return [gradient if on else None for gradient, on in zip(carry, self.ever, strict=True)]


def _either(some: Iterable[bool], others: Iterable[bool]) -> Iterator[bool]:
    return (one or another for one, another in zip_longest(some, others, fillvalue=False))


class Record:
    """One run of a unit, in a graph of its own.

    It starts from detached leaves. What a kept one holds besides what autograd saved is the carry that it
    hands on and the places in the graph where that carry and the outputs were made; the outputs themselves
    are given away (`take_outputs`).
    """

    def __init__(
        self,
        sequence: Sequence,
        unit: int,
        carry: list[Any],
        xs: Several[torch.Tensor],
        wanted: Several[bool],
    ) -> None:
        self.cuts = sequence.cuts(unit)
        self.carry = [leaf.detach().requires_grad_() if differentiable(leaf) else leaf for leaf in carry]
        self.inputs = [_cut(xs[cut.leaf], cut, wanted[cut.leaf]) for cut in self.cuts]
        # Autograd counts writes in place: a cell that changes its inputs is found without looking at data.
        before = versions([*self.carry, *self.inputs])
        with torch.enable_grad(), _own_saving():
            after, pieces = _run(sequence, unit, list(self.carry), list(self.inputs))
        if versions([*self.carry, *self.inputs]) != before:
            raise changed_in_place()
        self.next_carry = [_handed_on(leaf) for leaf in after]
        self.pieces = [Piece(place, [detached(leaf) for leaf in leaves]) for place, leaves in pieces]
        self.places = [place for place, _ in pieces]
        made = [leaves for _, leaves in pieces]
        self.flows = Flows(
            [_needs_gradient(leaf) for leaf in after],
            [any(map(_needs_gradient, leaves)) for leaves in zip(*made, strict=True)],
        )
        self.ends = [*after, *(leaf for leaves in made for leaf in leaves)]

    def keep(self) -> None:
        """Hold on to where the graph of the unit ends, and not to what was made there."""
        # A gradient edge (node and output number) is enough to start a backward from; the tensor itself may
        # go.
        self.ends = [_edge(leaf) for leaf in self.ends]

    def take_outputs(self) -> list[Piece]:
        """The outputs; they are not held here any longer."""
        pieces, self.pieces = self.pieces, []
        return pieces

    def backward(
        self,
        carry: Gradients,
        outputs: Iterable[Gradients],
        closed: Several[torch.Tensor],
        autocast: State = (),
    ) -> tuple[Gradients, Gradients, Gradients]:
        """The gradients of the carry, of the inputs and of the closed-over tensors; frees what was saved.

        `carry` holds the gradient of each leaf of the next carry, `outputs` those of the outputs, piece by
        piece. `autocast` is the state that the user's backward was called in: a unit is recomputed under that
        of the forward, and goes back under this one.
        """
        ends = zip(self.ends, [*carry, *(part for piece in outputs for part in piece)], strict=True)
        given = [(edge, part) for edge, part in ends if edge is not None and part is not None]
        starts = [leaf for leaf in (*self.carry, *self.inputs) if _needs_gradient(leaf)]
        with switched_to(autocast):
            found = iter(_grad(given, [*starts, *closed]))
        return (
            [next(found) if _needs_gradient(leaf) else None for leaf in self.carry],
            [next(found) if _needs_gradient(leaf) else None for leaf in self.inputs],
            list(found),
        )


def _needs_gradient(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


def _grad(given: list[tuple[Any, torch.Tensor]], wanted: list[torch.Tensor]) -> Gradients:
    if not given or not wanted:
        return [None] * len(wanted)
    edges, gradients = zip(*given, strict=True)
    # torch.autograd.grad, without its checks: as many seconds as a small cell's backward
    found = private("run_backward")(
        edges, gradients, False, False, tuple(wanted), True, accumulate_grad=False
    )
    return list(found)


def _run(
    sequence: Sequence, unit: int, carry: list[Any], inputs: list[torch.Tensor]
) -> tuple[list[Any], list[Piece]]:
    try:
        return sequence.run(unit, carry, inputs)
    except RuntimeError as error:
        if "leaf Variable that requires grad" in str(error):
            raise changed_in_place() from error
        raise


def _own_saving() -> AbstractContextManager[Any]:
    """A context in which autograd saves tensors as they are, whoever packs them outside (`checkpoint`)."""
    if private("saving_hooks")(True) is None:
        return nullcontext()
    return saved_tensors_hooks(torch.detach, torch.detach)  # a saved output itself would hold its own graph


def _cut(leaf: torch.Tensor, cut: Cut, wanted: bool) -> torch.Tensor:
    part = leaf.detach()[cut.place]
    return part.requires_grad_() if wanted else part


def _edge(leaf: Any) -> Any:
    return get_gradient_edge(leaf) if _needs_gradient(leaf) else None


def _handed_on(leaf: Any) -> Any:
    """A leaf of the next carry, without the rest of a larger storage."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return leaf.detach() if is_whole(leaf) else leaf.detach().clone()


def is_whole(leaf: torch.Tensor) -> bool:
    """Whether a tensor does not hold on to the rest of a larger storage."""
    return leaf.untyped_storage().nbytes() <= leaf.numel() * leaf.itemsize


def versions(leaves: Iterable[Any]) -> list[int]:
    """How often each tensor was changed in place."""
    return [private_of(leaf, "version") for leaf in leaves if isinstance(leaf, torch.Tensor)]
