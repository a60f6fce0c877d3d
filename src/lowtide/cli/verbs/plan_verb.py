"""`lowtide plan`: the fastest plan under a budget."""

from __future__ import annotations

import argparse

from ...console.progress import waiting
from ...report.page import page
from ...report.text import text
from ...units import parse_budget
from . import Answer
from .files import check_place, save
from .outcome import deliver
from .source import source_of

__all__ = ["run"]


def run(chosen: argparse.Namespace) -> Answer:
    """Plan, write what was asked for and show the plan."""
    check_place(chosen.output)
    check_place(chosen.report)
    source = source_of(chosen)
    with waiting("planning"):
        plan = source.under(parse_budget(chosen.budget), chosen.method).with_bound()
    if chosen.report is not None:
        save(chosen.report, page(plan))
    return deliver(plan, text(plan), chosen)
