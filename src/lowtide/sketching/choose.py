"""Choosing which of a captured step's layers keep a sketch, and planning the step with just those."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from torch import fx

from ..capture.fx_nodes import storage_of, tensors_of
from ..errors import BudgetTooSmall
from ..stages import Asked, Planned, Priced, Sketched
from ..units import format_bytes
from .decide import Draft, decide
from .marks import Mark, of_layers, ranked
from .replace import MarkedStep

__all__ = ["choose"]

_MOST_SHOWN = 8


def _in_words(layers: Sequence[str], exact: Sequence[str], able: int, saved: int) -> str:
    """What was chosen of the layers that may keep a sketch, as the note of a plan."""
    parts = [f"{len(layers)} of {able} sketched layers keep a sketch" + _places(layers)]
    if exact:
        parts.append(f"{len(exact)} keep only the rows that get a gradient" + _places(exact))
    if saved:
        parts.append(f"that is {format_bytes(saved)} less than their inputs")
    if not layers:
        parts.append("the step is exact")
    elif len(layers) + len(exact) < able:
        parts.append("the others are exact")
    return "; ".join(parts) + (": lowtide.noise shows the noise" if layers else "")


def _places(layers: Sequence[str]) -> str:
    """Layers in brackets by their names; of many, those of repeated blocks are one."""
    found = list(layers)
    if len(found) > _MOST_SHOWN:
        found = list(dict.fromkeys(re.sub(r"\d+", "*", name) for name in layers))
    shown = ", ".join([*found[:_MOST_SHOWN], *(["..."] if len(found) > _MOST_SHOWN else [])])
    return f" ({shown})" if found else ""


Price = Callable[[Asked, fx.GraphModule], Priced]
Plan = Callable[[Priced], Planned]


class Limits(Protocol):
    """What the budget says of a priced step."""

    def byte_limit(self, priced: Priced) -> int | None:
        """The bytes that it may take; None where the smallest peak is asked for."""

    def uncapped_peak(self, priced: Priced) -> int:
        """The peak of keeping everything of it."""

    def settled(self, priced: Priced) -> Asked:
        """What was asked, with the bytes of the knee of this step: other choices are held against these."""


def choose(asked: Asked, marked: MarkedStep, *, price: Price, limits: Limits, plan: Plan) -> Planned:
    """The step, planned, with as few of the marked layers sketched as its budget needs.

    A plan that was handed in brings its choice along. Where a step is planned again for less, its choice
    stands while that fits. `price` and `plan` are the ways to a priced stage and to a plan of it, `limits`
    says what it may take.
    """
    drafts = _Drafts(asked, marked, price, limits)
    handed_in, before, budget = asked.options.plan, asked.sketched, asked.options.budget
    if budget is not None and (budget.is_knee or (handed_in is not None and budget.is_share_of_peak)):
        drafts.make(())  # the exact step, which a share is of, and a knee
    if handed_in is not None:
        return _first_that_fits([drafts.make(handed_in.sketched + handed_in.trimmed)], plan)
    able = ranked(marked.marks, drafts.seconds())
    if before is not None:
        return _first_that_fits([drafts.make(before.layers + before.exact), drafts.of(able)], plan)
    return _first_that_fits(decide(able, drafts.of), plan)


def _first_that_fits(drafts: Iterable[Draft[Priced]], plan: Plan) -> Planned:
    """Plan one after the other in full until there is a plan."""
    errors = []
    for draft in dict.fromkeys(drafts):
        try:
            return plan(draft.step)
        except BudgetTooSmall as error:
            errors.append(error)
    raise min(errors, key=lambda error: error.smallest)


class _Drafts:
    """The step with any of its marks sketched, each made once."""

    def __init__(self, asked: Asked, marked: MarkedStep, price: Price, limits: Limits) -> None:
        self.asked, self.marked, self.price, self.limits = asked, marked, price, limits
        self.able = len(_layers(marked.marks))
        self.made: dict[tuple[str, ...], Draft[Priced]] = {}
        self.whole = 0 if asked.sketched is None else asked.sketched.whole

    def of(self, groups: Sequence[Collection[str]]) -> Draft[Priced]:
        """The step with groups of layers sketched."""
        return self.make({layer for group in groups for layer in group})

    def make(self, layers: Collection[str]) -> Draft[Priced]:
        """The step with some layers sketched, traced and priced."""
        chosen = of_layers(self.marked.marks, layers)
        noisy, exact = (_layers(mark for mark in chosen if bool(mark.part) is some) for some in (False, True))
        names = noisy + exact
        if names not in self.made:
            saved = sum(mark.saved for mark in chosen)
            words = _in_words(noisy, exact, self.able, saved)
            asked = replace(self.asked, sketched=Sketched(noisy, exact, saved, self.whole, words))
            step = self.price(asked, self.marked.replaced(chosen))
            graph = step.lifted.graph
            if not names:
                self.whole = self.limits.uncapped_peak(step)
                self.asked = replace(self.asked, options=self.limits.settled(step).options)
            self.made[names] = Draft(step, graph, self.limits.byte_limit(step))
        return self.made[names]

    def seconds(self) -> dict[int, float]:
        """What each value of the exact step takes to be computed, by the storage of its tensor."""
        lifted = self.make(()).step.lifted
        return {
            storage_of(tensor): op.seconds
            for op in lifted.graph.ops
            for name in op.writes
            for tensor in tensors_of(lifted.root_of[name])
        }


def _layers(marks: Iterable[Mark]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(layer for mark in marks for layer in mark.layers))
