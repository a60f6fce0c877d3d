"""Choosing which of a captured step's layers keep a sketch, and planning the step with just those."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..capture.fx_nodes import storage_of, tensors_of
from ..errors import BudgetTooSmall
from ..units import format_bytes
from .decide import Draft, decide
from .marks import Mark, of_layers, ranked
from .replace import MarkedStep

if TYPE_CHECKING:
    from ..pipeline.pipeline import Piece

__all__ = ["Sketches", "choose"]

_MOST_SHOWN = 8


@dataclass(frozen=True)
class Sketches:
    """The layers that keep a sketch, of so many that may, and by how many bytes that is smaller.

    `exact` are those that keep the rows that get a gradient in its place; `whole` is the uncapped peak of
    the step with neither.
    """

    layers: tuple[str, ...]
    exact: tuple[str, ...]
    able: int
    saved: int
    whole: int

    def __str__(self) -> str:
        sketched, trimmed = len(self.layers), len(self.exact)
        parts = [f"{sketched} of {self.able} sketched layers keep a sketch" + _places(self.layers)]
        if trimmed:
            parts.append(f"{trimmed} keep only the rows that get a gradient" + _places(self.exact))
        if self.saved:
            parts.append(f"that is {format_bytes(self.saved)} less than their inputs")
        if not sketched:
            parts.append("the step is exact")
        elif sketched + trimmed < self.able:
            parts.append("the others are exact")
        return "; ".join(parts) + (": lowtide.noise shows the noise" if sketched else "")


def _places(layers: Sequence[str]) -> str:
    """Layers in brackets by their names; of many, those of repeated blocks are one."""
    found = list(layers)
    if len(found) > _MOST_SHOWN:
        found = list(dict.fromkeys(re.sub(r"\d+", "*", name) for name in layers))
    shown = ", ".join([*found[:_MOST_SHOWN], *(["..."] if len(found) > _MOST_SHOWN else [])])
    return f" ({shown})" if found else ""


def choose(piece: Piece, marked: MarkedStep, forward_outputs: int) -> Piece:
    """The piece, planned, with as few of the marked layers sketched as its budget needs.

    A plan that was given brings its choice along. Where a step is planned again for less, its choice stands
    while that fits.
    """
    drafts = _Drafts(piece, marked, forward_outputs)
    given, before, budget = piece.options.plan, piece.sketches, piece.options.budget
    if given is not None:
        if budget is not None and budget.is_share_of_peak:
            drafts.make(())  # the exact step, which a share is of
        return _first_that_fits([drafts.make(given.sketched + given.trimmed)])
    able = ranked(marked.marks, drafts.seconds())
    if before is not None:
        return _first_that_fits([drafts.make(before.layers + before.exact), drafts.of(able)])
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
        self.able = len(_layers(marked.marks))
        self.made: dict[tuple[str, ...], Draft[Piece]] = {}
        self.whole = 0 if piece.sketches is None else piece.sketches.whole

    def of(self, groups: Sequence[Collection[str]]) -> Draft[Piece]:
        """The step with groups of layers sketched."""
        return self.make({layer for group in groups for layer in group})

    def make(self, layers: Collection[str]) -> Draft[Piece]:
        """The step with some layers sketched, traced and priced."""
        chosen = of_layers(self.marked.marks, layers)
        noisy, exact = (_layers(mark for mark in chosen if bool(mark.part) is some) for some in (False, True))
        names = noisy + exact
        if names not in self.made:
            saved = sum(mark.saved for mark in chosen)
            sketches = Sketches(noisy, exact, self.able, saved, self.whole)
            step = replace(self.piece, sketches=sketches)
            step.take(self.marked.replaced(chosen), self.forward_outputs)
            assert step.lifted is not None
            graph = step.lifted.graph
            if not names:
                self.whole = step.uncapped_peak()
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


def _layers(marks: Iterable[Mark]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(layer for mark in marks for layer in mark.layers))
