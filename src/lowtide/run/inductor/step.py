"""The Inductor executor: the planned pair of graphs as fused kernels, and the check that they keep the plan.

Inductor asks a *partitioner* for the forward and the backward graph of its own joint graph. Ours plans on
what is in memory once loops are fused, and hands over graphs in which a node may stand several times, in the
plan's order. What Inductor makes of them is read from the code that it generates, before that runs: where
it would need more than the budget, the step is planned again with less, a few times.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from ...console.log import log
from ...errors import BudgetTooSmall
from ...planner.follow import plan_too_large
from ...planner.too_small import too_small
from ...plans.planned_step import Plan
from ...stages import Asked, Runner
from ...units import format_bytes, parse_budget
from .attempt import Attempt, Lower
from .first_step import FirstStep
from .kept_headroom import write_headroom

__all__ = ["compiled_runner"]

_ROUNDS = 5


def compiled_runner(asked: Asked, module: fx.GraphModule, inputs: Sequence[Any], lower: Lower) -> Runner:
    """The runner of a step of fused kernels, compiled until its buffers fit the budget.

    A few times at most, and the smallest plan last. Where less is asked for than the smallest plan has, one
    between it and what did not fit comes first.
    """
    smallest: Plan | None = None
    missed: Plan | None = None
    last, key = False, ""
    for turn in itertools.count(1):
        attempt = Attempt(asked, lower, turn)
        try:
            run = attempt.compile(copy.deepcopy(module), inputs)
        except BudgetTooSmall as error:
            key = key or attempt.key
            if attempt.asked.headroom > asked.headroom:  # of an earlier process: another plan was found there
                continue
            if last or asked.only_plan:  # nothing is compiled that could show less than predicted
                raise
            last = missed is None or turn >= _ROUNDS - 1
            above = 0 if last or missed is None else missed.timeline.peak - error.smallest
            asked = replace(asked, headroom=error.budget - error.smallest - max(0, above // 2))
            continue
        except Exception:
            if not attempt.stopped:
                raise
        key, asked = key or attempt.key, attempt.asked
        if attempt.stage is None:  # no gradient passes here
            return Runner(run, None, asked.inputs)
        plan = attempt.result or attempt.plan()
        stage, attempt.stage = attempt.stage, None  # Inductor keeps the attempt, and need not keep the graphs
        asked = replace(asked, sketched=stage.captured.asked.sketched)  # the choice of this round
        if plan.budget is None or plan.peak <= plan.budget:
            if key and turn > 1:
                write_headroom(key, asked.headroom)
            first = attempt.first_step
            first.plan = plan
            runner = stage.runner(first.watching(run), plan)
            return replace(runner, renew=_SecondCompile(asked, module, lower, first))
        if asked.options.plan is not None:
            raise plan_too_large(plan, asked.options.budget)
        smallest = plan if smallest is None or plan.peak < smallest.peak else smallest
        missed = plan
        if last:
            break
        asked = leave_more(asked, plan, plan.peak - plan.budget, all_of_it=turn >= _ROUNDS - 1)
    assert smallest is not None
    assert smallest.budget is not None
    raise too_small(smallest, asked.options.budget or parse_budget(smallest.budget), smallest.budget)


def leave_more(asked: Asked, plan: Plan, over: int, *, all_of_it: bool = False) -> Asked:
    """Ask for less: for a peak that is lower than this plan's by more than was missing."""
    assert plan.budget is not None
    missing = format_bytes(over)
    log.info(f"the compiled step needs {missing} more than its budget: planning again with less")
    wanted = 0 if all_of_it else plan.timeline.peak - over - (over >> 2)
    return replace(asked, headroom=max(asked.headroom + 1, plan.budget - wanted))


@dataclass(frozen=True)
class _SecondCompile:
    """Asked before each call: the runner of another round, where the first step took more than its budget."""

    asked: Asked
    module: fx.GraphModule
    lower: Lower
    first: FirstStep

    def __call__(self, args: Sequence[Any]) -> Runner | None:
        plan, over = self.first.plan, self.first.over
        if not over or plan is None:
            return None
        return compiled_runner(leave_more(self.asked, plan, over), self.module, args, self.lower)
