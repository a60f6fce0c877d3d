"""What a verb works on: a graph file, or the training step of a user's own function, captured."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...console.progress import waiting
from ...devices.memory import DeviceMemory, memory_by_name, memory_of
from ...entry.user_step import capture_step, found_step, make_step, names_a_step
from ...errors import LowtideError
from ...planner.under_budget import plan_graph
from ...plans.graph import Graph
from ...plans.keep_all import keep_all
from ...plans.planned_step import Plan, make_plan
from ...units import Budget
from .files import read_graph

__all__ = ["Source", "capture", "source_of"]

OF_A_STEP = ("device", "executor", "optimizer", "step_in_backward", "batch_size", "ranks")


@dataclass(frozen=True)
class Source:
    """The plan that keeps everything, and what is known of the memory of the device that it is for."""

    vanilla: Plan
    device: DeviceMemory
    planning_seconds: float

    def under(self, asked: Budget, method: str) -> Plan:
        """The plan under a budget."""
        plan = self.vanilla
        return plan_graph(
            plan.graph,
            asked,
            method=method,
            device=self.device,
            notes=plan.notes,
            planning_seconds=self.planning_seconds,
        )


def source_of(chosen: argparse.Namespace, read: Callable[..., Graph | Plan] = read_graph) -> Source:
    """The source that was named: a file, or a step."""
    if not names_a_step(chosen.source):
        return _of_file(chosen, read)
    vanilla = capture(chosen.source, chosen)
    return Source(vanilla, memory_of(vanilla.graph, chosen.device), chosen.planning_seconds)


def _of_file(chosen: argparse.Namespace, read: Callable[..., Graph | Plan]) -> Source:
    for name in OF_A_STEP:
        if getattr(chosen, name) is not None:
            raise LowtideError(
                f"--{name.replace('_', '-')} is for a step, as in model.py:make_step; the graph in "
                f"{chosen.source} is captured already"
            )
    found = read(chosen.source, most_bytes=chosen.most_bytes, most_ops=chosen.most_ops)
    plan = found if isinstance(found, Plan) else make_plan(found, keep_all(found), method="keep_all")
    return Source(plan, memory_by_name(plan.graph.device), chosen.planning_seconds)


def capture(named: str, chosen: argparse.Namespace, **options: Any) -> Plan:
    """The plan that keeps everything of the step of that name, unless the options have a budget."""
    with waiting(f"capturing {named}"), found_step(named) as function:
        step = make_step(function, chosen.batch_size)
        return capture_step(
            step,
            device=chosen.device,
            executor=chosen.executor,
            optimizer=chosen.optimizer,
            step_in_backward=bool(chosen.step_in_backward),
            ranks=chosen.ranks,
            **options,
        )
