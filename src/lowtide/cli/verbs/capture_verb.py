"""`lowtide capture`: the graph of a training step, as a file that the other verbs read anywhere."""

from __future__ import annotations

import argparse

from ...units import format_bytes
from . import Answer
from .files import check_place
from .outcome import deliver
from .source import capture

__all__ = ["run"]


def run(chosen: argparse.Namespace) -> Answer:
    """Capture the step, write its graph and say what it is."""
    check_place(chosen.output)
    plan = capture(chosen.step, chosen)
    lines = [str(plan.graph), f"uncapped peak {format_bytes(plan.allocated)}"]
    return deliver(plan.graph, "\n".join(lines + [f"note: {note}" for note in plan.notes]), chosen)
