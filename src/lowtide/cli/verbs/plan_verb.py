"""`lowtide plan`: the fastest plan under a budget."""

from __future__ import annotations

import argparse

from ...console.progress import waiting
from ...entry.user_step import names_a_step
from ...errors import LowtideError
from ...planner.under_budget import knee_of
from ...plans.planned_step import Plan
from ...report.page import page
from ...report.text import text
from ...units import format_bytes, parse_budget
from . import Answer
from .files import check_place, save
from .outcome import deliver
from .source import Source, capture, source_of

__all__ = ["run"]


def run(chosen: argparse.Namespace) -> Answer:
    """Plan, write what was asked for and show the plan."""
    check_place(chosen.output)
    check_place(chosen.report)
    plan, knee = _plan(chosen)
    plan = plan.with_bound()
    if chosen.report is not None:
        save(chosen.report, page(plan))
    return deliver(plan, text(plan) + knee, chosen)


def _plan(chosen: argparse.Namespace) -> tuple[Plan, str]:
    """The plan under the budget, and a line on the knee; what runs in chunks is decided at the capture."""
    if chosen.split:
        if not names_a_step(chosen.source):
            raise LowtideError(
                f"--split is for a step, as in model.py:make_step; the graph in {chosen.source} is captured "
                "already"
            )
        return capture(
            chosen.source, chosen, budget=chosen.budget, method=chosen.method, split=chosen.split
        ), ""
    source = source_of(chosen)
    with waiting("planning"):
        plan = source.under(parse_budget(chosen.budget), chosen.method)
        # A plan of auto has come out of a search that saw all of them; no other one begins a search here.
        return plan, _knee(source) if plan.method == "auto" else ""


def _knee(source: Source) -> str:
    found, kept = knee_of(source.vanilla.graph, source.device), source.vanilla
    share, extra = found.peak / max(kept.peak, 1), found.seconds / (kept.seconds or 1.0) - 1
    return (
        f"\nKnee: {format_bytes(found.peak)} ({share:.1%} of uncapped) at {extra:+.1%} of time. Below it a "
        "percent of memory costs more than a percent of time.\n"
    )
