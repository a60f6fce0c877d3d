"""`lowtide frontier`: the plans that trade time for memory best."""

from __future__ import annotations

import argparse

from ...console.progress import bar
from ...planner.frontiers import frontier
from . import Answer
from .files import check_place
from .outcome import deliver
from .source import source_of

__all__ = ["run"]


def run(chosen: argparse.Namespace) -> Answer:
    """Search the frontier and show its table."""
    check_place(chosen.output)
    vanilla = source_of(chosen).vanilla
    with bar("frontier") as progress:
        found = frontier(
            vanilla, points=chosen.points, progress=progress, planning_seconds=chosen.planning_seconds
        )
    return deliver(found, str(found), chosen)
