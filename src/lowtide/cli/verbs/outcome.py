"""What a verb made, printed for people or for a machine, and written where that was asked for."""

from __future__ import annotations

import argparse

from ...planner.frontiers import Frontier
from ...plans.graph import Graph
from ...plans.planned_step import Plan
from . import Answer
from .files import save

__all__ = ["deliver"]


def deliver(made: Graph | Plan | Frontier, text: str, chosen: argparse.Namespace) -> Answer:
    """Write the JSON form where it was asked for, and give what is to be printed."""
    if chosen.output not in (None, "-"):
        save(chosen.output, made.to_json())
    return Answer(made.to_json() if chosen.json or chosen.output == "-" else text)
