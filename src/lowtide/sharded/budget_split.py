"""One budget over the units of a sharded model: from a rehearsal to a plan for each call of a unit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ..errors import BudgetTooSmall
from ..planner.unit_plans import choice_of, saved_by
from ..planner.unit_split import Moment, peak_of, smallest, split
from ..plans.graph import Graph
from ..plans.planned_step import Plan
from ..plans.simulator import simulate
from ..units import Budget, format_bytes
from .rehearsal import Beside, Rehearsal, UnitCall

__all__ = ["Split", "Splitter"]

OUTSIDE = "outside of the units"
SAVED = "saved by other units"


@dataclass(frozen=True)
class Split:
    """A plan for each call of a unit, the peak of the whole step, and what it is without a budget.

    `base` was there when the budget was split, `outside` is what the root holds between forward and backward.
    """

    calls: tuple[UnitCall, ...]
    plans: tuple[Plan, ...]
    peak: int
    uncapped: int
    plan: Plan
    base: int
    outside: int

    @property
    def extra(self) -> float:
        """Seconds of recomputation as a share of running everything once."""
        return _extra(self.plans)


@dataclass(frozen=True)
class Splitter:
    """What a budget is split over: the moments of a rehearsed step beside `bands` that are always there."""

    rehearsal: Rehearsal
    bands: dict[str, int]

    @property
    def base(self) -> int:
        """The bytes that are there during the whole step."""
        return sum(self.bands.values())

    @cached_property
    def moments(self) -> list[Moment]:
        """Each call of a unit, with what is beside it and the choices it has."""
        return [
            Moment(self.beside(call), self.outside(place), tuple(map(choice_of, call.planned)))
            for place, call in enumerate(self.rehearsal.calls)
        ]

    @property
    def end(self) -> int:
        """What is there when all units wait for their backward."""
        return self.outside(len(self.rehearsal.calls))

    def outside(self, place: int) -> int:
        return self.base + self.rehearsal.outside.get(place, Beside()).total

    def beside(self, call: UnitCall) -> int:
        """The bytes beside a call that are not in the graph of its own."""
        late = (self.rehearsal.calls[other].planned for other in call.late)
        waiting = sum(max(map(saved_by, plans)) for plans in late)
        return self.base + waiting + worst(call).total - self.counted_twice(call)

    def counted_twice(self, call: UnitCall) -> int:
        """The bytes that the graph of a unit has among its values, and that are beside it as well."""
        held = _by_kind(call.planned[0].graph)
        own = min(held.get("parameter", 0), self.rehearsal.groups[call.unit.group].whole)
        buffers = min(held.get("buffer", 0), self.bands.get("buffers", 0))
        return own + buffers + min(held.get("input", 0), call.inputs)

    def uncapped(self) -> int:
        """The peak of keeping everything."""
        return peak_of(self.moments, self.end, [0] * len(self.moments))

    def under(self, asked: Budget, size: int | None) -> Split:
        """The split under a budget in bytes, None for the smallest peak; `BudgetTooSmall` if nothing fits."""
        least = None
        if size is None:
            chosen = smallest(self.moments, self.end)
        else:
            kept = [0] * len(self.moments)
            fits = self.uncapped() <= size
            found = kept if fits else split(self.moments, self.end, size)
            if found is None:
                least = smallest(self.moments, self.end)
            chosen = found if found is not None else least or []
        made = self.made(chosen, size)
        if least is not None and size is not None:
            raise self.too_small(made, asked, size)
        return made

    def made(self, chosen: Sequence[int], size: int | None) -> Split:
        calls = self.rehearsal.calls
        plans = tuple(call.planned[place] for call, place in zip(calls, chosen, strict=True))
        return Split(
            tuple(calls),
            plans,
            peak_of(self.moments, self.end, chosen),
            self.uncapped(),
            self.shown(plans, chosen, size),
            self.base,
            self.rehearsal.outside.get(len(calls), Beside()).outside,
        )

    def shown(self, plans: Sequence[Plan], chosen: Sequence[int], size: int | None) -> Plan:
        """The plan of the call with the largest peak, with all that is beside it in bands."""
        saved = [0]
        for moment, choice in zip(self.moments, chosen, strict=True):
            saved.append(saved[-1] + moment.choices[choice].saved)
        sums = [m.beside + before + p.peak for m, before, p in zip(self.moments, saved, plans, strict=False)]
        place = max(range(len(sums)), key=sums.__getitem__)
        call, plan = self.rehearsal.calls[place], plans[place]
        whole = peak_of(self.moments, self.end, chosen)
        bands = self.bands_of(call, saved[place], whole - sums[place])
        graph = plan.graph.replace(fixed={**plan.graph.fixed, **bands})
        names = len({id(each.unit) for each in self.rehearsal.calls})
        return replace(
            plan,
            graph=graph,
            timeline=simulate(graph, plan.schedule),
            budget=size,
            notes=(
                f"one budget over {names} units of fully_shard, {_extra(plans):+.1%} time in all: this is "
                f"{call.unit.name}, beside which there is most; the others have plans of their own",
                "outside of the units the model runs as it is: its bytes are counted, and nothing of it is "
                "recomputed",
            ),
        )

    def bands_of(self, call: UnitCall, saved: int, more: int) -> dict[str, int]:
        """What is beside a call, by names that a user knows."""
        beside, held = worst(call), _by_kind(call.planned[0].graph)
        own = min(held.get("parameter", 0), self.rehearsal.groups[call.unit.group].whole)
        bands = {
            **self.bands,
            "unsharded parameters": beside.unsharded - own,
            "communication buffers": beside.buffers,
            "gradients of other units": beside.gradients,
            SAVED: saved,
        }
        bands["buffers"] = bands.get("buffers", 0) - min(held.get("buffer", 0), bands.get("buffers", 0))
        bands[OUTSIDE] = self.beside(call) + saved + more - sum(bands.values())
        return {name: size for name, size in bands.items() if size > 0}

    def too_small(self, least: Split, asked: Budget, size: int) -> BudgetTooSmall:
        """The error of a budget that no plans of the units fit under."""
        parts = dict(least.plan.graph.fixed)
        parts[f"{_unit_of(least)} itself"] = least.peak - sum(parts.values())
        listed = ", ".join(f"{name} {format_bytes(part)}" for name, part in parts.items())
        return BudgetTooSmall(
            f"budget {asked} ({size} bytes) is below the smallest feasible peak found on this device, "
            f"{format_bytes(least.peak)} ({least.peak} bytes: {listed}). Try budget={least.peak}, a smaller "
            "batch, smaller units (fully_shard more of the model's blocks), or more devices.",
            budget=size,
            smallest=least.peak,
            parts=parts,
        )


def _extra(plans: Sequence[Plan]) -> float:
    once = sum(plan.seconds - plan.timeline.again for plan in plans)
    return sum(plan.timeline.again for plan in plans) / once if once else 0.0


def worst(call: UnitCall) -> Beside:
    """What is beside a call in its forward or in its backward, whichever is more."""
    return max(call.forward, call.backward, key=lambda beside: beside.total)


def _unit_of(least: Split) -> str:
    sizes = [
        (plan.graph.fingerprint == least.plan.graph.fingerprint, call)
        for plan, call in zip(least.plans, least.calls, strict=True)
    ]
    return next((call.unit.name for same, call in sizes if same), "the unit")


def _by_kind(graph: Graph) -> dict[str, int]:
    found: dict[str, int] = {}
    for value in graph.values:
        found[value.kind] = found.get(value.kind, 0) + value.bytes
    return found
