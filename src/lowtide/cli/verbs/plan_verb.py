"""`lowtide plan`: the fastest plan under a budget."""

from __future__ import annotations

import argparse

from ...console.progress import waiting
from ...entry.user_step import names_a_step
from ...errors import LowtideError
from ...plans.planned_step import Plan
from ...report.page import page
from ...report.text import text
from ...units import parse_budget
from . import Answer
from .files import check_place, save
from .outcome import deliver
from .source import capture, source_of

__all__ = ["run"]


def run(chosen: argparse.Namespace) -> Answer:
    """Plan, write what was asked for and show the plan."""
    check_place(chosen.output)
    check_place(chosen.report)
    plan = _plan(chosen).with_bound()
    if chosen.report is not None:
        save(chosen.report, page(plan))
    return deliver(plan, text(plan), chosen)


def _plan(chosen: argparse.Namespace) -> Plan:
    """The plan under the budget; what runs in chunks is decided while the step is captured."""
    if chosen.split:
        if not names_a_step(chosen.source):
            raise LowtideError(
                f"--split is for a step, as in model.py:make_step; the graph in {chosen.source} is captured "
                "already"
            )
        return capture(chosen.source, chosen, budget=chosen.budget, method=chosen.method, split=chosen.split)
    source = source_of(chosen)
    with waiting("planning"):
        return source.under(parse_budget(chosen.budget), chosen.method)
