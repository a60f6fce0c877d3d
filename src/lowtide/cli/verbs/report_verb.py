"""`lowtide report`: a plan as one HTML file, from a plan file, a graph file or a step."""

from __future__ import annotations

import argparse
from pathlib import Path

from ...console.progress import waiting
from ...errors import LowtideError
from ...plans.planned_step import Plan
from ...report.page import page
from ...units import format_bytes, parse_budget
from . import Answer
from .files import check_place, read_graph_or_plan, save
from .source import source_of

__all__ = ["run"]


def run(chosen: argparse.Namespace) -> Answer:
    """Write the page of the plan, and say where it is."""
    check_place(chosen.output)
    html = page(_plan(chosen))
    if chosen.output == "-":
        return Answer(html)
    save(chosen.output, html)
    return Answer(f"report: {chosen.output} ({format_bytes(Path(chosen.output).stat().st_size)})")


def _plan(chosen: argparse.Namespace) -> Plan:
    """The plan as it was saved, or keeping everything; a budget makes another one of the same graph."""
    source = source_of(chosen, read_graph_or_plan)
    if chosen.budget is None:
        if chosen.method != "auto":
            raise LowtideError(f"--method {chosen.method} needs a --budget to plan for")
        return source.vanilla
    with waiting("planning"):
        return source.under(parse_budget(chosen.budget), chosen.method).with_bound()
