"""A capped step watched while it runs: the bytes on the device after each run of its plan.

A dispatch mode sees every operator that the step calls; those that are not ops of the graph (views, the loss
outside of it) are passed over, and the others are matched with the runs of the schedule in order. An op that
overwrites what it reads is run by another form of its operator (`relu_`, `out=`). The bytes
are read when an operator has returned, so a workspace that it has freed by then is not in them. This is for
the eager executor: kernels that Inductor generated call no operators.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from .._torch import private_of
from ..arguments import all_of, function, kind_of
from ..measuring.tracker import live_storages
from ..plans.graph import Op
from ..plans.planned_step import Plan
from ..plans.schedule import Run
from ..torch_state.dispatch_modes import in_place_of_operators

__all__ = ["Watched", "watch"]

AHEAD = 4
"""Runs that may be passed over for a later one: the executor may call another kernel than was traced."""


@dataclass(frozen=True)
class Watched:
    """What a step took: peak bytes, seconds (while watched), and the bytes after each run that was seen.

    `points` are bytes by the index of the run in the plan's schedule.

    >>> import lowtide, torch
    >>> model, x = torch.nn.Linear(4, 4), torch.ones(2, 4)
    >>> step = lowtide.cap(lambda x: model(x).sum(), "1MiB")
    >>> step(x).backward()
    >>> model.zero_grad()
    >>> seen = lowtide.watch(lambda: step(x).backward(), lowtide.plan_of(step))
    >>> seen.peak == lowtide.plan_of(step).peak
    True
    """

    peak: int
    seconds: float
    points: dict[int, int] = field(default_factory=dict)
    reserved: int | None = None


def watch(step: Callable[[], Any], plan: Plan, *, resident: Iterable[torch.Tensor] = ()) -> Watched:
    """Run a capped step once and follow its bytes along its plan, for `plan.report(path, measured=...)`.

    On the CPU `resident` are tensors that are there all along and that the step may not touch.

    >>> import lowtide, torch
    >>> model, x = lowtide.cap(torch.nn.Linear(4, 4), "1MiB"), torch.ones(2, 4)
    >>> model(x).sum().backward()
    >>> seen = lowtide.watch(lambda: model(x).sum().backward(), lowtide.plan_of(model))
    >>> len(seen.points)
    3
    """
    function("step", step, "step()")
    kind_of("watch", plan, Plan, "the Plan of the step, as lowtide.plan_of(model) gives it")
    resident = all_of("resident", resident, torch.Tensor, "tensors, as in resident=model.parameters()")
    on_cuda = plan.graph.device.partition(":")[0] == "cuda"
    return _on_cuda(step, plan) if on_cuda else _on_cpu(step, plan, resident)


def _on_cuda(step: Callable[[], Any], plan: Plan) -> Watched:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    matcher = _Matcher(plan, torch.cuda.memory_allocated)
    start = time.perf_counter()
    with in_place_of_operators(matcher.call):
        step()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    reserved = torch.cuda.max_memory_reserved()
    return Watched(torch.cuda.max_memory_allocated(), seconds, matcher.points, reserved)


def _on_cpu(step: Callable[[], Any], plan: Plan, resident: Iterable[torch.Tensor]) -> Watched:
    tracker = _followed_storages(plan)
    for tensor in resident:
        tracker.give(tensor)
    start = time.perf_counter()
    with tracker.mode:
        step()
    seconds = time.perf_counter() - start
    points = {index: tracker.input_bytes + made for index, made in tracker.matcher.points.items()}
    return Watched(tracker.peak, seconds, points)


class _followed_storages(live_storages):  # noqa: N801  # like its base
    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.matcher = _Matcher(plan, lambda: self.made)

    def call(self, operator: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        result = super().call(operator, args, kwargs)
        self.matcher.note(operator)
        return result


class _Matcher:
    def __init__(self, plan: Plan, now: Callable[[], int]) -> None:
        steps = enumerate(plan.schedule.steps)
        self.runs = [(index, plan.graph.op[step.op]) for index, step in steps if isinstance(step, Run)]
        self.at = 0
        self.now = now
        self.points: dict[int, int] = {}

    def call(self, operator: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        result = operator(*args, **kwargs)
        self.note(operator)
        return result

    def note(self, operator: Any) -> None:
        """An operator has returned: the next run that it may be has its bytes."""
        # Only a few runs ahead: some runs call another operator than their op names (a fused one), and a
        # search through the whole plan would jump over all that follows.
        for place, (index, op) in enumerate(self.runs[self.at : self.at + AHEAD], self.at):
            if _may_run(operator, op):
                self.points[index] = self.now()
                self.at = place + 1
                return


def _may_run(operator: Any, op: Op) -> bool:
    """Whether this is the operator of an op, or a form of it that writes into what the op may overwrite."""
    name = str(operator)
    if not op.takes or _packet(name) != _packet(op.target):
        return name == op.target
    return name == op.target or bool(private_of(operator, "schema").is_mutable)


def _packet(name: str) -> str:
    """`aten.relu` of both `aten.relu.default` and `aten.relu_.default`."""
    return name.rpartition(".")[0].removesuffix("_")
