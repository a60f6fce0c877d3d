"""A step of the eager executor; it is planned again where its first run met other strides than foretold."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx

from .._torch import JointTrace, boxed, private
from ..capture.joint_graph import through_aot
from ..capture.known_kernels import learn
from ..capture.lift import module_path, source_line, target_name
from ..console.log import log, say_plan
from ..console.stage_seconds import timed
from ..errors import BudgetTooSmall
from ..plans.planned_step import Plan
from ..prices.measured import Kernels
from ..run.backward import Backward
from ..run.eager import compile_graph
from ..run.first_run import Misfits, checked
from ..stages import Asked, Captured, Lowered, Planned, Runner
from ..units import format_bytes
from .other_holds import OtherHolds, other_holds
from .returned import Holds, Returned, returned_by
from .way_down import lowered, lowered_again

__all__ = ["eager_runner"]


def eager_runner(
    asked: Asked,
    module: fx.GraphModule,
    inputs: Sequence[Any],
    holds: Holds | None = None,
    captured: Captured | None = None,
    trace: JointTrace | None = None,
) -> Runner:
    """The runner of a step, op by op; `holds` is what is known of who holds its results.

    A step that is `captured` already, by a trace that was kept, is planned from there.
    """
    halves, trace = _Halves(asked, captured), trace or JointTrace()
    with timed("AOTAutograd"):
        run = through_aot(module, inputs, halves, asked.autocast, trace)
    stage, halves.stage = halves.stage, None  # AOTAutograd keeps the halves, and need not keep the graphs
    if stage is None:
        return Runner(run, None, asked.inputs)
    runner = stage.runner(run, stage.planned.plan, halves.returned)
    holds = holds or Holds()
    other = other_holds(holds, halves.returned, runner, stage.planned, trace)
    return replace(runner, renew=_SecondPlan(asked, module, holds, stage.planned, halves.misfits, other))


class _Halves:
    """What AOTAutograd asks for in one capture; it brings the stage from one question to the next."""

    def __init__(self, asked: Asked, captured: Captured | None = None) -> None:
        self.asked = asked
        self.captured = captured
        self.stage: Lowered | None = None
        self.plan: Plan | None = None
        self.constants: Mapping[str, Any] = {}
        self.expected: tuple[bool, ...] = ()
        self.pauses = False
        self.misfits: Misfits | None = None
        self.returned: Returned | None = None
        self.outputs = 0

    def partition(
        self, joint: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **_: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        captured, self.captured = self.captured, None
        if captured is None:
            self.stage = lowered(self.asked, joint, num_fwd_outputs)
        else:
            self.stage = lowered_again(self.asked, captured)
        self.constants, self.expected = self.stage.captured.constants, self.stage.captured.expected
        self.plan, self.pauses = self.stage.planned.plan, bool(self.stage.groups)
        self.misfits = Misfits.on(self.stage.captured.trace.device)
        self.returned, self.outputs = returned_by(self.stage.planned), num_fwd_outputs
        if self.asked.piece is not None:
            self.asked.piece.see(self.stage)
        return self.stage.forward, self.stage.backward

    @timed("code of the forward")
    def forward(self, module: fx.GraphModule, inputs: Any) -> Callable[[list[Any]], Any]:
        assert self.misfits is not None
        run = checked(self.with_constants(module), "forward", self.misfits)
        if self.asked.piece is not None:
            return self.asked.piece.showing_forward(run)  # type: ignore[no-any-return]
        return run if self.returned is None else boxed(self.returned.noting(run, self.outputs))

    @timed("code of the backward")
    def backward(self, module: fx.GraphModule, inputs: Any) -> Callable[[list[Any]], Any]:
        assert self.misfits is not None
        assert self.plan is not None
        made = self.with_constants(module)
        run = Backward(made, self.expected, self.misfits, pauses=self.pauses, plan=self.plan).boxed()
        return run if self.asked.piece is None else self.asked.piece.showing_backward(run)

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
    holds: Holds
    planned: Planned | None
    misfits: Misfits | None
    other: OtherHolds | None

    def __call__(self, args: Sequence[Any]) -> Runner | None:
        return self.with_real_strides(args) or self.with_other_holds(args)

    def with_other_holds(self, args: Sequence[Any]) -> Runner | None:
        """The runner of a plan for what the caller was seen to hold."""
        other = self.other
        if other is None or not other.found():
            return None
        plan = other.prediction()
        if plan is not None:
            return other.with_prediction(plan, self)
        self.other = None
        captured, trace = other.start()
        try:
            return self.again(args, captured, trace) if other.pays() else None
        except BudgetTooSmall:
            if other.must():
                raise
            return None

    def again(
        self, args: Sequence[Any], captured: Captured | None = None, trace: JointTrace | None = None
    ) -> Runner:
        """The runner of a step that is planned anew, and captured anew where it is not `captured`."""
        asked = replace(self.asked, released=self.holds.released)
        with private("without_modes")():
            runner = eager_runner(asked, self.module, args, self.holds, captured, trace)
        if runner.plan is not None:
            say_plan(runner.plan)
        return runner

    def with_real_strides(self, args: Sequence[Any]) -> Runner | None:
        """The runner of a plan for the strides that the first run met."""
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
        over = found.tracker.peak + plan.graph.fixed_bytes - plan.allocated
        if over > 0 and found.first is not None:
            _say(found, plan, over, again=again)
        return self.again(args) if again else None


def _say(found: Misfits, plan: Plan, over: int, *, again: bool) -> None:
    """Tell where memory was taken that no plan stood for."""
    assert found.first is not None
    where = " at ".join(filter(None, (module_path(found.first), source_line(found.first)))) or "the step"
    then = "It is planned again with the real ones" if again else 'Plan with prices="measured", or for less'
    log.warning(
        f"{target_name(found.first)} in {where} returned a tensor with other strides than torch foretold, so "
        f"the last step took {format_bytes(over)} more than the {format_bytes(plan.allocated)} that were "
        f"planned. {then}."
    )
