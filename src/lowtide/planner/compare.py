"""Methods against budgets on one graph: the smallest peak of each method, its extra time under each budget.

A method is asked once for the smallest peak and once per budget. At each budget the fastest of all these
plans that fits counts, whichever it was asked for: some methods fit a budget only when asked for less. Every
figure is the simulator's; the seconds of planning are the clock's. A method that cannot run here, because an
extra is not installed, gets its reason instead of figures. No torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..devices.memory import DeviceMemory, memory_by_name
from ..errors import BudgetError, LowtideError
from ..plans import json_format
from ..plans.graph import Graph
from ..plans.keep_all import keep_all
from ..plans.patience import PLANNING_SECONDS, planning_for
from ..plans.planned_step import Plan, make_plan
from ..solve import find_method
from ..units import format_bytes, format_seconds, parse_budget
from .budgets import resolve
from .under_budget import settled

__all__ = ["Comparison", "Row", "compare"]

FORMAT_VERSION = 1


@dataclass(frozen=True)
class Row:
    """What a method made of a graph: its smallest peak, its extra time at each budget, or why nothing."""

    method: str
    smallest: int | None = None
    extra: tuple[float | None, ...] = ()
    planning: float = 0.0
    error: str | None = None


@dataclass(frozen=True)
class Comparison:
    """A row per method, a column per budget (as it was written, with its bytes)."""

    vanilla: Plan
    budgets: dict[str, int]
    rows: tuple[Row, ...]

    def to_json(self) -> str:
        """The comparison as JSON text."""
        graph = self.vanilla.graph
        data: dict[str, Any] = {
            "lowtide": "comparison",
            "version": FORMAT_VERSION,
            "device": graph.device,
            "ops": len(graph.ops),
            "peak": self.vanilla.peak,
            "seconds": self.vanilla.seconds,
            "budgets": [{"budget": text, "bytes": size} for text, size in self.budgets.items()],
            "methods": [asdict(row) for row in self.rows],
        }
        return json_format.dump(data)

    def __str__(self) -> str:
        graph, wide = self.vanilla.graph, max(len(row.method) for row in self.rows)
        heads = "".join(f"  {text:>8}" for text in self.budgets)
        lines = [
            f"{len(graph.ops)} ops for {graph.device}; keeping everything: peak "
            f"{format_bytes(self.vanilla.peak)}, {format_seconds(self.vanilla.seconds)} ({graph.prices})",
            f"{'':<{wide}}  {'smallest peak':>20}  extra time at a budget of",
            f"{'method':<{wide}}  {'(of vanilla)':>20}{heads}  {'planning':>8}",
        ]
        lines += [f"{row.method:<{wide}}  {self._cells(row)}" for row in self.rows]
        return "\n".join(lines)

    def _cells(self, row: Row) -> str:
        if row.smallest is None:
            return f"none: {row.error}"
        smallest = f"{format_bytes(row.smallest)} ({row.smallest / max(self.vanilla.peak, 1):6.1%})"
        times = ["-" if extra is None else f"{extra:+.1%}" for extra in row.extra]
        cells = zip(times, self.budgets, strict=True)
        shown = "".join(f"  {extra:>{max(8, len(head))}}" for extra, head in cells)
        return f"{smallest:>20}{shown}  {row.planning:>6.1f} s"


def compare(
    graph: Graph,
    methods: Sequence[str],
    budgets: Sequence[str],
    *,
    device: DeviceMemory | None = None,
    progress: Callable[[float, str], None] = lambda share, method: None,
    planning_seconds: float = PLANNING_SECONDS,
) -> Comparison:
    """Every method at every budget; a share is of the graph's vanilla peak.

    `device` is what is known of the device's memory, if that is more than the graph says.
    """
    for method in methods:
        find_method(method)
    vanilla = make_plan(graph, keep_all(graph), method="keep_all")
    memory = device or memory_by_name(graph.device)
    sizes = {text: _column(text, vanilla, memory) for text in budgets}
    rows = []
    for index, method in enumerate(methods):

        def advance(done: float, index: int = index, method: str = method) -> None:
            progress((index + done) / len(methods), method)

        rows.append(_row(graph, method, list(sizes.values()), advance, planning_seconds))
    return Comparison(vanilla, sizes, tuple(rows))


def _column(text: str, vanilla: Plan, device: DeviceMemory) -> int:
    size = resolve(settled(parse_budget(text), vanilla.graph, device), vanilla.peak, device)
    if size is None:
        raise BudgetError('budget "min" is no column: the smallest peak of each method is always shown')
    return size


def _row(
    graph: Graph, method: str, sizes: list[int], advance: Callable[[float], None], planning_seconds: float
) -> Row:
    solve, plans, planning = find_method(method), [], 0.0
    for index, size in enumerate([0, *sizes]):
        advance(index / (len(sizes) + 1))
        start = time.perf_counter()
        try:
            with planning_for(planning_seconds):
                schedule = solve(graph, size)
            planning += time.perf_counter() - start
            plans.append(make_plan(graph, schedule, method=method))
        except LowtideError as error:
            return Row(method, planning=planning, error=" ".join(str(error).split()))
    fitting = ([plan.extra for plan in plans if plan.peak <= size] for size in sizes)
    extra = tuple(min(found, default=None) for found in fitting)
    return Row(method, min(plan.peak for plan in plans), extra, planning)
