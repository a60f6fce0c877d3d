"""A step of the eager executor; it is planned again where its first run met other strides than foretold."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from .._torch import private
from ..capture.joint_graph import through_aot
from ..capture.known_kernels import learn
from ..capture.lift import module_path, source_line, target_name
from ..console.log import log, say_plan
from ..console.stage_seconds import timed
from ..plans.planned_step import Plan
from ..prices.measured import Kernels
from ..run.backward import Backward
from ..run.eager import compile_graph
from ..run.first_run import Misfits, checked
from ..stages import Asked, Lowered, Planned, Runner
from ..units import format_bytes
from .way_down import lowered

__all__ = ["eager_runner"]


def eager_runner(asked: Asked, module: fx.GraphModule, inputs: Sequence[Any]) -> Runner:
    """The runner of a step, op by op."""
    halves = _Halves(asked)
    with timed("AOTAutograd"):
        run = through_aot(module, inputs, halves, asked.autocast)
    stage, halves.stage = halves.stage, None  # AOTAutograd keeps the halves, and need not keep the graphs
    if stage is None:
        return Runner(run, None, asked.inputs)
    plan = stage.planned.plan
    return stage.runner(run, plan, _SecondPlan(asked, module, stage.planned, halves.misfits))


class _Halves:
    """What AOTAutograd asks for in one capture; it brings the stage from one question to the next."""

    def __init__(self, asked: Asked) -> None:
        self.asked = asked
        self.stage: Lowered | None = None
        self.constants: Mapping[str, Any] = {}
        self.expected: tuple[bool, ...] = ()
        self.pauses = False
        self.misfits: Misfits | None = None

    def partition(
        self, joint: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **_: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        self.stage = lowered(self.asked, joint, num_fwd_outputs)
        self.constants, self.expected = self.stage.captured.constants, self.stage.captured.expected
        self.pauses = bool(self.stage.groups)
        self.misfits = Misfits.on(self.stage.captured.trace.device)
        return self.stage.forward, self.stage.backward

    @timed("code of the forward")
    def forward(self, module: fx.GraphModule, inputs: Any) -> Callable[[list[Any]], Any]:
        assert self.misfits is not None
        return checked(self.with_constants(module), "forward", self.misfits)

    @timed("code of the backward")
    def backward(self, module: fx.GraphModule, inputs: Any) -> Callable[[list[Any]], Any]:
        assert self.misfits is not None
        made = self.with_constants(module)
        return Backward(made, self.expected, self.misfits, pauses=self.pauses).boxed()

    def inference(self, module: fx.GraphModule, inputs: Any) -> Callable[[list[Any]], Any]:
        self.asked.refuse_inference()
        return compile_graph(module, "forward")

    def with_constants(self, module: fx.GraphModule) -> fx.GraphModule:
        """The module with the captured constants themselves: AOTAutograd hands over copies."""
        for node in module.graph.find_nodes(op="get_attr"):
            setattr(module, str(node.target), self.constants[str(node.target)])
        return module


@dataclass
class _SecondPlan:
    """Asked before each call: the runner of a second plan, where the first run saw what is new.

    Only what is new can change a plan. A plan that was handed in is followed as it is.
    """

    asked: Asked
    module: fx.GraphModule
    planned: Planned | None
    misfits: Misfits | None

    def __call__(self, args: Sequence[Any]) -> Runner | None:
        found, planned = self.misfits, self.planned
        if found is None or planned is None:
            return None
        # Ranks that run one schedule plan again together: they ask each other once, when all have run.
        together = planned.any_rank is not bool
        if found.first is None and not (together and found.ran):
            return None
        self.misfits = self.planned = None
        plan = planned.plan
        device = torch.device(plan.graph.device)
        new = learn(found.facts, partial(Kernels, device) if self.asked.measured else None)
        again = planned.any_rank(new and self.asked.options.plan is None)
        over = found.tracker.peak + plan.graph.fixed_bytes - plan.peak
        if over > 0 and found.first is not None:
            _say(found, plan, over, again=again)
        if not again:
            return None
        with private("without_modes")():
            runner = eager_runner(self.asked, self.module, args)
        say_plan(runner.plan or plan)
        return runner


def _say(found: Misfits, plan: Plan, over: int, *, again: bool) -> None:
    """Tell where memory was taken that no plan stood for."""
    assert found.first is not None
    where = " at ".join(filter(None, (module_path(found.first), source_line(found.first)))) or "the step"
    then = "It is planned again with the real ones" if again else 'Plan with prices="measured", or for less'
    log.warning(
        f"{target_name(found.first)} in {where} returned a tensor with other strides than torch foretold, so "
        f"the last step took {format_bytes(over)} more than the {format_bytes(plan.peak)} that were planned. "
        f"{then}."
    )
