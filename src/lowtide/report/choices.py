"""The plans of one graph that a reader may choose from, and what each would change.

Keeping everything and the plan itself are always among them; the frontier and the plans of other methods
where the caller has them: to find them takes longer than to write a report. O(plans * steps).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ..errors import LowtideError
from ..planner.frontiers import Frontier, spread
from ..plans.planned_step import Plan
from ..plans.schedule import Run
from .decision import Decision, decisions
from .fold import Fold, fold
from .place import Place, Places
from .residency import Residency

__all__ = ["Change", "PlanChoice", "changes", "choices"]

MOST = 40
"""Plans of a frontier that are shown."""

MOST_CHANGES = 14


@dataclass(frozen=True, slots=True)
class PlanChoice:
    """A plan to choose; `sort` is "this", "uncapped", "frontier" or "other"."""

    plan: Plan
    sort: str
    label: str
    is_knee: bool = False

    @property
    def recomputations(self) -> int:
        """How many runs are repeated ones."""
        runs = [step.op for step in self.plan.schedule.steps if isinstance(step, Run)]
        return len(runs) - len(set(runs))


@dataclass(frozen=True, slots=True)
class Change:
    """Values for which another plan decides otherwise, identical layers folded."""

    where: str
    what: str
    count: int
    bytes: int
    before: str
    after: str


def choices(plan: Plan, whole: Plan, frontier: Frontier | None, others: Iterable[Plan]) -> list[PlanChoice]:
    """The plans to choose from, from the largest peak to the smallest; `whole` keeps everything."""
    found = [PlanChoice(plan, "this", f"this plan ({plan.method})")]
    found.append(PlanChoice(whole, "uncapped", "keeping everything"))
    if frontier is not None:
        _check(plan, frontier.graph.fingerprint, "frontier=")
        plans = spread(frontier.plans, MOST, among=frontier.knee)
        found += [PlanChoice(one, "frontier", "frontier") for one in plans]
    for other in others:
        _check(plan, other.graph.fingerprint, "others=")
        found.append(PlanChoice(other, "other", other.method))
    once: dict[tuple[int, float], PlanChoice] = {}
    for choice in found:
        once.setdefault(_place(choice.plan), choice)
    if frontier is not None and len(frontier) > 1:
        place = _place(frontier.knee)
        once[place] = replace(once[place], is_knee=True, label=f"{once[place].label}, the knee")
    return sorted(once.values(), key=lambda choice: (-choice.plan.allocated, choice.plan.extra))


def _place(plan: Plan) -> tuple[int, float]:
    return plan.allocated, round(plan.extra, 9)


def changes(shown: Residency, other: Plan, places: Places) -> list[Change]:
    """What another plan decides otherwise, by the bytes concerned; small ones are left out."""
    before, after = shown.decisions, decisions(other.graph, other.schedule)
    items = [
        _Item(name, shown.graph.value[name].bytes, before[name], after[name], places.of_value(name))
        for name in before
        if before[name] != after[name] and shown.graph.value[name].bytes
    ]
    found = fold(items, path=lambda item: item.place.path, alike=_alike)
    return sorted(map(_change, found), key=lambda row: -row.bytes)[:MOST_CHANGES]


@dataclass(frozen=True, slots=True)
class _Item:
    name: str
    bytes: int
    before: Decision
    after: Decision
    place: Place


def _alike(item: _Item) -> tuple[str, str, Decision, Decision]:
    return item.place.what, item.place.source, item.before, item.after


def _change(found: Fold[_Item]) -> Change:
    first, count = found.members[0], len(found.members)
    return Change(found.where, first.place.what, count, found.bytes, str(first.before), str(first.after))


def _check(plan: Plan, fingerprint: str, name: str) -> None:
    if fingerprint != plan.graph.fingerprint:
        raise LowtideError(f"{name} is of another graph than the plan; make both from the same graph")
