"""Choosing which of a captured step's layers keep a sketch, and planning the step with just those."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..errors import BudgetTooSmall
from ..nodes import storage_of, tensors_of
from ..simulate import simulate
from ..solve.keep_all import keep_all
from ..units import format_bytes
from .decide import Draft, decide
from .marks import of_layers, ranked
from .replace import MarkedStep

if TYPE_CHECKING:
    from ..capture import Piece

__all__ = ["Sketches", "choose"]

_MOST_SHOWN = 8


@dataclass(frozen=True)
class Sketches:
    """The layers that keep a sketch, of so many that may, and by how many bytes these are smaller.

    `whole` is the uncapped peak of the step with none.
    """

    layers: tuple[str, ...]
    able: int
    saved: int
    whole: int

    def __str__(self) -> str:
        if not self.layers:
            return f"0 of {self.able} sketched layers keep a sketch: the step is exact"
        places = list(dict.fromkeys(re.sub(r"\d+", "*", name) for name in self.layers))
        which = ", ".join([*places[:_MOST_SHOWN], *(["..."] if len(places) > _MOST_SHOWN else [])])
        rest = "" if len(self.layers) == self.able else "; the others are exact"
        saved = format_bytes(self.saved)
        return (
            f"{len(self.layers)} of {self.able} sketched layers keep a sketch ({which}): {saved} less than "
            f"their inputs, for weight gradients with noise (see lowtide.noise){rest}"
        )


def choose(piece: Piece, marked: MarkedStep, forward_outputs: int) -> Piece:
    """The piece, planned, with as few of the marked layers sketched as its budget needs.

    A plan that was given brings its choice along. Where a step is planned again for less, its choice stands
    while that fits.
    """
    drafts = _Drafts(piece, marked, forward_outputs)
    given, before = piece.options.plan, piece.sketches
    if given is not None:
        return _first_that_fits([drafts.make(given.sketched)])
    able = ranked(marked.marks, drafts.seconds())
    if before is not None:
        return _first_that_fits([drafts.make(before.layers), drafts.of(able)])
    return _first_that_fits(decide(able, drafts.of))


def _first_that_fits(drafts: Iterable[Draft[Piece]]) -> Piece:
    """Plan one after the other in full until there is a plan."""
    errors = []
    for draft in dict.fromkeys(drafts):
        try:
            draft.step.make_plan()
        except BudgetTooSmall as error:
            errors.append(error)
        else:
            return draft.step
    raise min(errors, key=lambda error: error.smallest)


class _Drafts:
    """The step with any of its marks sketched, each made once."""

    def __init__(self, piece: Piece, marked: MarkedStep, forward_outputs: int) -> None:
        self.piece, self.marked, self.forward_outputs = piece, marked, forward_outputs
        self.able = len({layer for mark in marked.marks for layer in mark.layers})
        self.made: dict[tuple[str, ...], Draft[Piece]] = {}
        self.whole = 0 if piece.sketches is None else piece.sketches.whole

    def of(self, groups: Sequence[Collection[str]]) -> Draft[Piece]:
        """The step with groups of layers sketched."""
        return self.make({layer for group in groups for layer in group})

    def make(self, layers: Collection[str]) -> Draft[Piece]:
        """The step with some layers sketched, traced and priced."""
        chosen = of_layers(self.marked.marks, layers)
        names = tuple(dict.fromkeys(layer for mark in chosen for layer in mark.layers))
        if names not in self.made:
            saved = sum(mark.saved for mark in chosen)
            step = replace(self.piece, sketches=Sketches(names, self.able, saved, self.whole))
            step.take(self.marked.replaced(chosen), self.forward_outputs)
            assert step.lifted is not None
            graph = step.lifted.graph
            if not names:
                self.whole = simulate(graph, keep_all(graph)).peak
            self.made[names] = Draft(step, graph, step.room())
        return self.made[names]

    def seconds(self) -> dict[int, float]:
        """What each value of the exact step takes to be computed, by the storage of its tensor."""
        lifted = self.make(()).step.lifted
        assert lifted is not None
        return {
            storage_of(tensor): op.seconds
            for op in lifted.graph.ops
            for name in op.writes
            for tensor in tensors_of(lifted.root_of[name])
        }
