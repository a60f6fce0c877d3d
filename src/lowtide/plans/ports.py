"""What a plan's methods need from the rooms above this one: they put it here when they are loaded.

A plan is data, and knows neither solvers nor reports. But `plan.report(...)` and `plan.with_bound()` are how
users ask for them, so the two rooms fill in a port each (`report/page.py`, `solve/bound`). Whoever has a plan
from the public API has loaded both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from .graph import Graph
    from .planned_step import Plan

__all__ = ["Page", "fill", "lower_bound", "page"]


class Page(Protocol):
    """Writes a plan as an HTML document."""

    def __call__(self, plan: Plan, *, frontier: Any, others: Iterable[Plan], measured: Any) -> str: ...


_ports: dict[str, Callable[..., Any]] = {}


def fill(name: str, function: Callable[..., Any]) -> None:
    """Take a function in, by the name of the port that it fills."""
    _ports[name] = function


def page(plan: Plan, *, frontier: Any = None, others: Iterable[Plan] = (), measured: Any = None) -> str:
    """The plan as an HTML document, by `report/`."""
    write: Page = _ports["page"]
    return write(plan, frontier=frontier, others=others, measured=measured)


def lower_bound(graph: Graph, budget: int) -> float:
    """The proven lower bound on the seconds of any schedule of a graph, by `solve/bound`."""
    bound: float = _ports["lower_bound"](graph, budget)
    return bound
