"""The frontier of a graph: its undominated (peak, seconds) plans, from keeping all to the smallest peak.

A plan is dominated when another one is no larger and no slower, and better in one of the two. The schedules
come from `solve.auto`, which finds them all in one search; each is judged by the simulator, and only its
verdict counts. Plans are sorted by falling peak, so by rising seconds. Where a plan below the vanilla peak
costs no time, the frontier starts with that one. O(plans * steps) after the search; no torch.

Limits: the search is `auto`'s and proves nothing; plans between two neighbours, or below the last, may exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..arguments import function
from ..devices.memory import memory_by_name
from ..errors import FormatError, LowtideError, ScheduleError
from ..plans import json_format
from ..plans.graph import Graph
from ..plans.keep_all import keep_all
from ..plans.patience import PLANNING_SECONDS, check_seconds, planning_for
from ..plans.planned_step import Plan, _write, make_plan
from ..plans.schedule import Schedule
from ..solve.auto import frontier_schedules
from ..solve.knee import Point, knee
from ..units import Budget, format_bytes, parse_budget
from .budgets import resolve
from .too_small import too_small

__all__ = ["Frontier", "frontier"]

FORMAT_VERSION = 1
FIELDS = ("notes", "graph", "plans")
PLAN_FIELDS = ("method", "peak", "seconds", "extra", "schedule")

ROWS = 20
"""How many plans `str` shows."""

_ROUNDING = 1e-12
"""Sums of the same seconds in another order differ by less than this share."""


@dataclass(frozen=True)
class Frontier:
    """The undominated plans of one graph, from the largest peak to the smallest, fastest first.

    >>> import lowtide, torch
    >>> model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    >>> plans = lowtide.frontier(lowtide.plan(model, torch.empty(512, 64)))
    >>> plans[0].extra, plans[-1].peak < 0.6 * plans.vanilla, plans.best("1MiB").peak <= 2**20
    (0.0, True, True)
    """

    plans: tuple[Plan, ...]

    def __post_init__(self) -> None:
        if not self.plans:
            raise FormatError('field "plans": a frontier has at least one plan')
        for index, (large, small) in enumerate(pairwise(self.plans), start=1):
            if small.peak >= large.peak or small.seconds <= large.seconds:
                raise FormatError(f"plans[{index}]: it does not trade time for memory with the plan before")

    def __len__(self) -> int:
        return len(self.plans)

    def __iter__(self) -> Iterator[Plan]:
        return iter(self.plans)

    def __getitem__(self, index: int) -> Plan:
        return self.plans[index]

    @property
    def graph(self) -> Graph:
        """The graph that all plans are for."""
        return self.plans[0].graph

    @property
    def vanilla(self) -> int:
        """The peak of keeping everything, in bytes."""
        return self.plans[0].uncapped.peak

    @property
    def knee(self) -> Plan:
        """The plan below which the next percent of memory costs more than a percent of time."""
        points = {Point(plan.peak, plan.seconds): plan for plan in self.plans}
        once = self.plans[0].seconds - self.plans[0].timeline.again
        return points[knee(points, Point(self.vanilla, once))]

    def best(self, budget: int | str | Budget) -> Plan:
        """The fastest plan under a budget; raises `BudgetTooSmall` below the smallest peak.

        A share such as "50%" is of the vanilla peak; "90% of device" is of the memory of the GPU that the
        graph is for, if that is in the table; "min" is the plan with the smallest peak, "knee" that at the
        knee.
        """
        asked = parse_budget(budget)
        if asked.is_knee:
            return replace(self.knee, budget=self.knee.peak)
        size = resolve(asked, self.vanilla, memory_by_name(self.graph.device))
        if size is None:
            return self.plans[-1]
        for plan in self.plans:
            if plan.peak <= size:
                return replace(plan, budget=size)
        raise too_small(self.plans[-1], asked, size)

    def __str__(self) -> str:
        shown = spread(self.plans, ROWS, among=self.knee)
        some = f", {len(shown)} of them shown" if len(shown) < len(self) else ""
        graph, noun = self.graph, "plan" if len(self) == 1 else "plans"
        lines = [
            f"Frontier of {len(self)} {noun} for {graph.device}, {len(graph.ops)} ops ({graph.prices}){some}",
            f"  {'peak':>11}  {'of vanilla':>10}  {'extra time':>10}",
        ]
        for plan in shown:
            share = plan.peak / max(self.vanilla, 1)
            mark = "  knee" if plan == self.knee and len(self) > 1 else ""
            lines.append(f"  {format_bytes(plan.peak):>11}  {share:>10.1%}  {plan.extra:>+10.1%}{mark}")
        return "\n".join(lines + [f"  note: {note}" for note in self.plans[0].notes])

    def to_dict(self) -> dict[str, Any]:
        """The plain form that JSON is written from: the graph once, then each plan's figures and schedule."""
        return {
            "lowtide": "frontier",
            "version": FORMAT_VERSION,
            "notes": list(self.plans[0].notes),
            "graph": self.graph.to_dict(),
            "plans": [_plain(plan) for plan in self.plans],
        }

    @classmethod
    def from_dict(cls, data: Any, *, most_ops: int = json_format.MOST_OPS) -> Frontier:
        """The frontier of a plain form. Each schedule is judged again: a file cannot claim another peak."""
        json_format.check_header(data, "frontier", FORMAT_VERSION, FIELDS)
        graph = Graph.from_dict(data.get("graph"), most_ops=most_ops)
        notes = json_format.read_texts(data, "notes")
        items = enumerate(json_format.read_items(data, "plans"))
        return cls(tuple(_read(graph, notes, item, f"plans[{index}]") for index, item in items))

    def to_json(self) -> str:
        """The frontier as JSON text."""
        return json_format.dump(self.to_dict())

    @classmethod
    def from_json(cls, text: str, *, most_ops: int = json_format.MOST_OPS) -> Frontier:
        """The frontier of a JSON text; nothing in it is executed."""
        return cls.from_dict(json_format.parse(text, "frontier"), most_ops=most_ops)

    def save(self, path: str | Path) -> Path:
        """Write the frontier as JSON and return its path."""
        return _write(Path(path), self.to_json())

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        most_bytes: int = json_format.MOST_FILE_BYTES,
        most_ops: int = json_format.MOST_OPS,
    ) -> Frontier:
        """Read a frontier that `save` wrote."""
        data = json_format.read_bytes(Path(path), "frontier", most_bytes)
        return cls.from_json(json_format.decode(data, "frontier"), most_ops=most_ops)


def frontier(
    graph: Graph | Plan,
    *,
    points: int | None = None,
    progress: Callable[[float], None] | None = None,
    planning_seconds: float = PLANNING_SECONDS,
) -> Frontier:
    """The frontier of a graph, or of a plan's graph.

    `points` thins it to that number of plans, evenly spread by peak; both ends and the knee stay. `progress`
    is called with the share of the search that is done, from 0 to 1. After `planning_seconds` what was found
    until then is taken.

    >>> import lowtide, torch
    >>> model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    >>> print(lowtide.frontier(lowtide.plan(model, torch.empty(512, 64)), points=3))
    Frontier of 3 plans for cpu, 31 ops (roofline of cpu)
             peak  of vanilla  extra time
         1.63 MiB      100.0%       +0.0%
    ...
    """
    if points is not None and (not isinstance(points, int) or isinstance(points, bool) or points < 2):
        raise LowtideError(f"points={points!r} must be a whole number >= 2: a frontier has two ends")
    if progress is not None:
        function("progress", progress, "progress(share)")
    notes = graph.notes if isinstance(graph, Plan) else ()
    graph = graph.graph if isinstance(graph, Plan) else graph
    if not isinstance(graph, Graph):
        raise LowtideError(f"frontier takes a Graph or a Plan, not a {type(graph).__name__}")
    kept = keep_all(graph)
    plans = [make_plan(graph, kept, method="keep_all", notes=notes)]
    with planning_for(check_seconds(planning_seconds)):
        schedules = frontier_schedules(graph, progress)
    for schedule in schedules:
        if schedule != kept:
            plans.append(make_plan(graph, schedule, method="auto", notes=notes))
    found = _undominated(plans)
    whole = Frontier(found)
    return whole if points is None else Frontier(spread(found, points, among=whole.knee))


def spread(plans: Sequence[Plan], points: int, *, among: Plan | None = None) -> tuple[Plan, ...]:
    """At most n of the plans, evenly spread by peak: the first, the last and one that is to be among them."""
    if len(plans) <= points:
        return tuple(plans)
    first, last = plans[0].peak, plans[-1].peak
    chosen: list[int] = []
    for point in range(points):
        target = first + (last - first) * point / (points - 1)
        free = range(chosen[-1] + 1 if chosen else 0, len(plans) - (points - 1 - point))
        chosen.append(min(free, key=lambda index: abs(plans[index].peak - target)))
    if among is not None and points > 2 and (place := plans.index(among)) not in chosen:
        nearest = min(chosen[1:-1], key=lambda index: abs(plans[index].peak - among.peak))
        chosen = sorted({*chosen, place} - {nearest})
    return tuple(plans[index] for index in chosen)


def _undominated(plans: Iterable[Plan]) -> tuple[Plan, ...]:
    kept: list[Plan] = []
    for plan in sorted(plans, key=lambda plan: (plan.peak, plan.seconds)):
        if not kept or plan.seconds < kept[-1].seconds * (1 - _ROUNDING):
            kept.append(plan)
    return tuple(reversed(kept))


def _plain(plan: Plan) -> dict[str, Any]:
    return {
        "method": plan.method,
        "peak": plan.peak,
        "seconds": plan.seconds,
        "extra": plan.extra,
        "schedule": plan.schedule.to_dict(),
    }


def _read(graph: Graph, notes: tuple[str, ...], item: Any, where: str) -> Plan:
    if not isinstance(item, dict) or set(item) != set(PLAN_FIELDS):
        raise FormatError(f"{where}: expected an object with the fields {', '.join(PLAN_FIELDS)}")
    try:
        schedule = Schedule.from_dict(item["schedule"])
        method = json_format.read_text(item, "method", "unknown")
        plan = make_plan(graph, schedule, method=method, notes=notes)
    except (FormatError, ScheduleError) as error:
        raise FormatError(f"{where}: {error}") from None
    for name in ("peak", "seconds", "extra"):
        if item[name] != getattr(plan, name):
            raise FormatError(
                f"{where}.{name}: it is not what the schedule does "
                f"({json_format.say(item[name])} claimed, {getattr(plan, name)!r} simulated)"
            )
    return plan
