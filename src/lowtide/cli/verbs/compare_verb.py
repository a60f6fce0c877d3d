"""`lowtide compare`: every method at every budget."""

from __future__ import annotations

import argparse

from ...console.progress import bar
from ...errors import LowtideError
from ...planner.compare import compare
from ...solve import METHODS
from . import Answer
from .source import source_of

__all__ = ["run"]


def run(chosen: argparse.Namespace) -> Answer:
    """Compare the methods and show the table."""
    methods = list(METHODS) if chosen.methods is None else _listed(chosen.methods, "--methods")
    budgets = _listed(chosen.budgets, "--budgets")
    source = source_of(chosen)
    with bar() as progress:
        found = compare(
            source.vanilla.graph,
            methods,
            budgets,
            device=source.device,
            progress=progress,
            planning_seconds=chosen.planning_seconds,
        )
    return Answer(found.to_json() if chosen.json else str(found))


def _listed(text: str, option: str) -> list[str]:
    """The distinct items of a comma-separated option."""
    items = [item.strip() for item in text.split(",")]
    if not all(items):
        raise LowtideError(f"{option} {text!r} has an empty item; separate the items by single commas")
    return list(dict.fromkeys(items))
