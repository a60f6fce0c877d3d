"""One budget over the pieces of a step that torch could not capture as one graph: a plan for each of them.

While a piece runs, all that ran before it hold what they saved for their backward, and in the backward what
earlier ones still hold lies beneath the later ones. That is the problem of `unit_split`: each piece has a few
plans with other (saved, peak, seconds), one of them is chosen for each, for the least seconds. What is beside
a piece is read from the whole step as the simulator sees it (`joined_graph`), and hardly depends on what is
chosen. So the choice is made, the step is simulated, and where the peak is above the budget the choice is
made again with what was seen beside the pieces now, under as much less. The simulator alone says what fits.

Steps that begin with the same pieces and then part (a branch on data) share the plans of what they have in
common: it has run before it is known which of them it is. The one with the largest smallest peak goes first.

O(rounds * (choice + simulation)). Limits: the ladders of the pieces are the search's, so plans between their
rungs may exist; a choice is exact for what is beside it in that round.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..devices.memory import DeviceMemory
from ..errors import BudgetTooSmall
from ..plans.planned_step import Plan
from ..plans.schedule import Run
from ..units import Budget, format_bytes
from .budgets import resolve
from .joined_graph import BrokenStep, join, turn_of
from .too_small import peak_op, peak_parts
from .under_budget import with_allocator_overhead
from .unit_plans import saved_by
from .unit_split import Choice, Moment, knee_peak, smallest, split

__all__ = ["Chosen", "Ladders", "plan_together"]

_ROUNDS = 8
"""How often a choice is made again; chosen: two or three are enough where the pieces are large."""

Key = tuple[Any, ...]
"""A step by its pieces, in the order in which they run."""


@dataclass(frozen=True)
class Ladders:
    """A step in pieces, the plans that each turn may follow (the first keeps everything), bands beside it."""

    step: BrokenStep
    plans: tuple[tuple[Plan, ...], ...]
    fixed: Mapping[str, int]


@dataclass(frozen=True)
class Chosen:
    """The plan of a whole step, and of each of its turns."""

    plan: Plan
    turns: tuple[Plan, ...]


def plan_together(
    steps: Mapping[Key, Ladders],
    budget: Budget,
    device: DeviceMemory,
    notes: Callable[[Ladders, Chosen], Any],
) -> dict[Key, Chosen]:
    """The plans of all steps that a call may turn out to be; `BudgetTooSmall` tells the smallest peak.

    A step that does not fit beside plans which others have taken goes first the next time.
    """
    splits = {key: _Split(ladders, device) for key, ladders in steps.items()}
    asked = {key: one.settled(budget) for key, one in splits.items()}
    order = sorted(splits, key=lambda key: -splits[key].least.plan.peak if len(splits) > 1 else 0)
    for _ in order:
        found: dict[Key, Chosen] = {}
        for key in order:
            own = splits[key].with_taken(_taken(found, key))
            try:
                found[key] = own.under(budget, asked[key])
            except BudgetTooSmall:
                if key == order[0]:
                    raise
                break
        if len(found) == len(order):
            break
        order = [key, *(other for other in order if other != key)]
    else:
        raise _too_small_together(splits, order, budget, asked)
    return {
        key: replace(chosen, plan=_finished(chosen, asked[key], tuple(notes(steps[key], chosen))))
        for key, chosen in found.items()
    }


def _taken(found: Mapping[Key, Chosen], key: Key) -> list[Plan | None]:
    """The plans of the first turns of a step, where another step that begins so has them already."""
    taken = {other[: n + 1]: plan for other, done in found.items() for n, plan in enumerate(done.turns)}
    return [taken.get(key[: n + 1]) for n in range(len(key))]


def _finished(chosen: Chosen, size: int | None, notes: tuple[str, ...]) -> Plan:
    return replace(chosen.plan, budget=size, smallest=size is None, notes=notes)


class _Split:
    """The choice for one step."""

    def __init__(
        self,
        ladders: Ladders,
        device: DeviceMemory,
        peaks: dict[tuple[int, int], tuple[int, int]] | None = None,
    ) -> None:
        self.ladders, self.device = ladders, device
        self.known = {} if peaks is None else peaks

    @property
    def step(self) -> BrokenStep:
        return self.ladders.step

    def with_taken(self, taken: Sequence[Plan | None]) -> _Split:
        """The same choice, where some turns have their plan already."""
        plans = [own if one is None else (one,) for own, one in zip(self.ladders.plans, taken, strict=True)]
        return _Split(replace(self.ladders, plans=tuple(plans)), self.device, self.known)

    def made(self, chosen: Sequence[int]) -> Chosen:
        """The whole step with a choice, as the simulator judges it."""
        turns = tuple(plans[place] for plans, place in zip(self.ladders.plans, chosen, strict=True))
        plan = join(self.step, turns, fixed=self.ladders.fixed)
        return Chosen(with_allocator_overhead(plan, self.device.blocks), turns)

    @property
    def kept(self) -> Chosen:
        """The step that keeps everything."""
        return self.made([0] * len(self.step.turns))

    @property
    def least(self) -> Chosen:
        """The step with the smallest peak that was found."""
        best, moments, end = self.kept, *self.moments(self.kept)
        for _ in range(_ROUNDS):
            made = self.made(smallest(moments, end))
            if made.plan.peak >= best.plan.peak:
                break
            best, (moments, end) = made, self.moments(made)
        return best

    def settled(self, budget: Budget) -> int | None:
        """The bytes of a budget for this step; None for the smallest peak."""
        kept = self.kept
        if budget.is_knee:
            return knee_peak(*self.moments(kept))
        return resolve(budget, kept.plan.peak, self.device)

    def under(self, asked: Budget, size: int | None) -> Chosen:
        """The fastest choice that was found under a budget; None is the smallest peak that there is."""
        kept = self.kept
        if size is not None and kept.plan.peak <= size:
            return kept
        if size is None:
            least = self.least
            return min([least, *self.fitting(least.plan.peak)], key=lambda one: one.plan.seconds)
        found = min(self.fitting(size), key=lambda one: one.plan.seconds, default=None) or self.least
        if found.plan.peak > size:
            raise _too_small(found, asked, size)
        return found

    def fitting(self, size: int) -> list[Chosen]:
        """Choices whose step keeps to a size, as the simulator says."""
        found, limit, now = [], size, self.kept
        for _ in range(_ROUNDS):
            moments, end = self.moments(now)
            chosen = split(moments, end, limit)
            before, now = now, self.made(smallest(moments, end) if chosen is None else chosen)
            over = now.plan.peak - size
            if over <= 0:
                found.append(now)
                if now.turns == before.turns:
                    break
            limit -= max(over, 0)
        return found

    def moments(self, made: Chosen) -> tuple[list[Moment], int]:
        """Each turn with its choices, and what is there when all wait for their backward.

        A choice's peak is that of the turn alone with what was beside it in this step, in its forward and in
        its backward.
        """
        forward, backward, between = _peaks(made.plan)
        saved, moments = 0, []
        for place, (own, plans) in enumerate(zip(made.turns, self.ladders.plans, strict=True)):
            ahead, back = self.peaks_of(place, own)
            beside, after = forward.get(place, 0) - ahead - saved, backward.get(place, 0) - back - saved
            choices = []
            for plan in plans:
                ahead, back = self.peaks_of(place, plan)
                peak = max(ahead + beside, back + after if place in backward else 0)
                choices.append(Choice(saved_by(plan), peak, plan.seconds))
            moments.append(Moment(0, max(between.get(place, 0) - saved, 0), tuple(choices)))
            saved += saved_by(own)
        return moments, max(between.get(len(made.turns), 0) - saved, 0)

    def peaks_of(self, place: int, plan: Plan) -> tuple[int, int]:
        """The peaks of one turn by a plan, with nothing beside it, in its forward and in its backward."""
        key = place, id(plan)
        if key not in self.known:
            forward, backward, _ = _peaks(join(self.step.alone(place), [plan], fixed={}))
            self.known[key] = forward.get(0, 0), backward.get(0, 0)
        return self.known[key]


def _peaks(plan: Plan) -> tuple[dict[int, int], dict[int, int], dict[int, int]]:
    """The most bytes at once in the forward and in the backward of each turn, and between them.

    What runs between counts for the turns before it: by how many of them wait for their backward then.
    """
    forward: dict[int, int] = {}
    backward: dict[int, int] = {}
    between: dict[int, int] = {}
    timeline, waiting, turn = plan.timeline, 0, None
    for index, (step, resident) in enumerate(zip(plan.schedule.steps, timeline.resident, strict=True)):
        if isinstance(step, Run):
            before, turn = turn, turn_of(step.op)
            if turn is not None and turn != before:
                waiting = turn + 1 if index < timeline.boundary else turn
        if turn is None:
            between[waiting] = max(between.get(waiting, 0), resident)
        else:
            found = forward if index < timeline.boundary else backward
            found[turn] = max(found.get(turn, 0), resident)
    last = max(forward, default=-1) + 1
    there = timeline.resident[timeline.boundary - 1] if timeline.boundary else 0
    between[last] = max(between.get(last, 0), there + plan.graph.boundary)
    return forward, backward, between


def _too_small_together(
    splits: Mapping[Key, _Split], order: Sequence[Key], asked: Budget, sizes: Mapping[Key, int | None]
) -> BudgetTooSmall:
    """The error of steps that may each fit alone, but not with one plan for the pieces that they share."""
    found: dict[Key, Chosen] = {}
    for key in order:
        found[key] = splits[key].with_taken(_taken(found, key)).least
    key = max(found, key=lambda key: found[key].plan.peak)
    return _too_small(found[key], asked, sizes[key] or 0)


def _too_small(least: Chosen, asked: Budget, size: int) -> BudgetTooSmall:
    """The error of a budget below the smallest peak of the whole step: where its bytes are."""
    plan = least.plan
    parts, op = peak_parts(plan), peak_op(plan)
    listed = ", ".join(f"{name} {format_bytes(part)}" for name, part in parts.items() if part)
    turn = None if op is None else turn_of(op.name)
    where = "" if op is None else f"; largest step at {op.where}"
    where += "" if turn is None else f", in piece {turn + 1} of {len(least.turns)}"
    return BudgetTooSmall(
        f"budget {asked} ({size} bytes) is below the smallest feasible peak found for the pieces of this "
        f"step together, {format_bytes(plan.peak)} ({plan.peak} bytes: {listed}{where}). Try "
        f"budget={plan.peak}, a smaller batch, or fewer graph breaks: what lies between pieces is not "
        "recomputed.",
        budget=size,
        smallest=plan.peak,
        parts=parts,
    )
