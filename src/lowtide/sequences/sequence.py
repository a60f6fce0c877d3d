"""What a scan goes over: units of one or more steps, each run by one call.

A unit leads from one carry to the next and gives outputs for its places in time. For a cell, a unit is
`chunk` steps, one call of the cell each; for a stock recurrent module (see `recurrent`) it is one call on a
block of the input. Everything travels as flat lists of leaves: `carry` may hold tensors and plain
Python objects, `inputs` are tensors cut out of `xs`, outputs come as pieces with their place in time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import torch

from .._torch import private
from ..errors import LowtideError

__all__ = [
    "CellSequence",
    "Cut",
    "Form",
    "Piece",
    "Place",
    "Sequence",
    "detached",
    "differentiable",
    "flat",
    "kind_of",
    "pair_of",
    "say_leaf",
]

Place: TypeAlias = int | slice


class Cut(NamedTuple):
    """A place in time of one of the leaves of xs."""

    leaf: int
    place: Place


class Piece(NamedTuple):
    """The outputs for a place in time, one leaf each."""

    place: Place
    leaves: list[Any]


class Form(NamedTuple):
    """How a tree is built of its leaves; None in it is a place without a leaf."""

    spec: Any
    filled: tuple[bool, ...]

    def build(self, leaves: Iterable[Any]) -> Any:
        """The tree with these leaves."""
        rest = iter(leaves)
        return private("tree_unflatten")([next(rest) if on else None for on in self.filled], self.spec)

    def __str__(self) -> str:
        return str(self.spec)


def flat(tree: Any) -> tuple[list[Any], Form]:
    """The leaves and the form of inputs or outputs."""
    leaves, spec = private("tree_flatten")(tree)
    filled = tuple(leaf is not None for leaf in leaves)
    return [leaf for leaf in leaves if leaf is not None], Form(spec, filled)


class Sequence(ABC):
    """Units that run one after the other."""

    units: int
    """How many units there are."""

    length: int
    """How many steps there are."""

    chunk: int
    """The steps of a unit; the last one may have fewer."""

    reverse: bool
    """Whether it goes from the last step to the first."""

    signature: Hashable
    """What the bytes of a unit depend on, beside its carry and its inputs."""

    @abstractmethod
    def steps(self, unit: int) -> int:
        """The number of steps of a unit."""

    @abstractmethod
    def cuts(self, unit: int) -> list[Cut]:
        """What a unit reads of xs."""

    @abstractmethod
    def run(self, unit: int, carry: list[Any], inputs: list[torch.Tensor]) -> tuple[list[Any], list[Piece]]:
        """Run a unit: the next carry and the outputs."""

    @abstractmethod
    def in_records(self) -> Sequence:
        """The same steps in the units in which they are recorded where whole units are captured."""

    @abstractmethod
    def of_one_unit(self) -> Sequence:
        """The steps of one unit, in the units in which they are recorded."""


@dataclass
class CellSequence(Sequence):
    """A cell over a number of steps; `reverse` goes from the last step to the first."""

    cell: Callable[[Any, Any], tuple[Any, Any]]
    carry_form: Any
    xs_form: Form
    xs_leaves: int
    length: int
    chunk: int = 1
    reverse: bool = False
    signature: Hashable = None  # type: ignore[assignment]
    ys_form: Form | None = None

    @property
    def units(self) -> int:  # type: ignore[override]  # made of the other fields
        return -(-self.length // self.chunk)

    def steps(self, unit: int) -> int:
        return min(self.chunk, self.length - unit * self.chunk)

    def times(self, unit: int) -> list[int]:
        """The places in time of a unit, in the order of its steps."""
        start = unit * self.chunk
        times = range(start, start + self.steps(unit))
        return [self.length - 1 - time for time in times] if self.reverse else list(times)

    def cuts(self, unit: int) -> list[Cut]:
        return [Cut(leaf, time) for time in self.times(unit) for leaf in range(self.xs_leaves)]

    def run(self, unit: int, carry: list[Any], inputs: list[torch.Tensor]) -> tuple[list[Any], list[Piece]]:
        pieces = []
        for number, time in enumerate(self.times(unit)):
            x = inputs[number * self.xs_leaves : (number + 1) * self.xs_leaves]
            carry, y = self.step(carry, x)
            pieces.append(Piece(time, y))
        return carry, pieces

    def in_records(self) -> CellSequence:
        return replace(self, chunk=1)

    def of_one_unit(self) -> CellSequence:
        return replace(self, length=self.chunk, chunk=1)

    def step(self, carry: list[Any], x: list[torch.Tensor]) -> tuple[list[Any], list[Any]]:
        """One call of the cell; refuses a result that could not be the next step's carry."""
        flatten, unflatten = private("tree_flatten"), private("tree_unflatten")
        after, y = pair_of(self.cell(unflatten(carry, self.carry_form), self.xs_form.build(x)))
        leaves, form = flatten(after)
        _check_carry(self.carry_form, carry, form, leaves)
        ys, ys_form = flat(y)
        if self.ys_form is None:
            self.ys_form = ys_form
        elif self.ys_form != ys_form:
            raise LowtideError(f"the cell's output changed its structure from {self.ys_form} to {ys_form}")
        return leaves, ys


def pair_of(result: Any) -> tuple[Any, Any]:
    """The next carry and the output that a cell returned."""
    if not isinstance(result, tuple) or len(result) != 2:
        raise LowtideError(
            f"the cell returned {say_leaf(result)}; it must return a pair: the next carry and an output "
            "(None where there is none)"
        )
    return result


def _check_carry(before_form: Any, before: list[Any], after_form: Any, after: list[Any]) -> None:
    if before_form != after_form:
        raise LowtideError(
            f"the cell returned a carry of another structure than it was given: {after_form} instead of "
            f"{before_form}; return the carry in the form of init"
        )
    for number, (old, new) in enumerate(zip(before, after, strict=True)):
        if kind_of(old) != kind_of(new):
            raise LowtideError(
                f"the cell turned leaf {number} of its carry from {say_leaf(old)} into {say_leaf(new)}; "
                "a carry keeps its shape, dtype and device: let init be what the cell returns"
            )


def kind_of(leaf: Any) -> Any:
    """What stays the same of a leaf of the carry from step to step."""
    if not isinstance(leaf, torch.Tensor):
        return type(leaf)
    return leaf.shape, leaf.dtype, leaf.device


def say_leaf(leaf: Any) -> str:
    """A leaf in words."""
    if not isinstance(leaf, torch.Tensor):
        return f"a {type(leaf).__name__}"
    return f"a tensor {tuple(leaf.shape)} of {str(leaf.dtype).removeprefix('torch.')} on {leaf.device}"


def detached(leaf: Any) -> Any:
    """A leaf without its graph."""
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


def differentiable(leaf: Any) -> bool:
    """Whether a leaf can carry a gradient."""
    return isinstance(leaf, torch.Tensor) and (leaf.dtype.is_floating_point or leaf.dtype.is_complex)
