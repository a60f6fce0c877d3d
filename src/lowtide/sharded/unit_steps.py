"""A unit's forward, captured and run by the plan that its turn in the step gives it.

FSDP's hooks stand around the forward: they gather the parameters before it and before its backward, and free
and reduce after both. The parameters that the unit's graph reads are the same tensors each time, with other
memory behind them. A unit's backward may so recompute from them, as long as nobody has changed the parts that
they are gathered from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from .._torch import private, private_of, usual_stance
from ..capture.joint_graph import capturing
from ..capture.plain_masks import masks_as_traced
from ..capture.rewrites.autocast import mark_regions
from ..capture.rewrites.random_draws import lay_out_calls
from ..capture.step_inputs import StepInputs
from ..capture.torch_errors import OnlyPlanned, clear_errors
from ..devices.memory import memory_of
from ..errors import CaptureError, NothingToTrain, PlanMismatch, UnsupportedBackward
from ..lowering.changed_inputs import Watch, Watched
from ..options import Options
from ..pipeline.compiled_calls import captured
from ..pipeline.eager_step import eager_runner
from ..pipeline.in_flight import Caller
from ..pipeline.runnable_step import RunnableStep, runnable
from ..planner.unit_plans import choice_of, saved_by, unit_plans
from ..plans.graph import Graph
from ..plans.planned_step import Plan
from ..sketching.marker import leaving_marks
from ..stages import Asked, Runner
from ..torch_state.dispatch_modes import with_foreign_modes, without_foreign_modes
from .fsdp_groups import Unit, groups_of

__all__ = ["SharedRunners", "UnitSteps", "captured_graph"]


def captured_graph(
    unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options
) -> Graph | None:
    """The priced graph of a unit's step, from fake tensors; None where no gradient passes it."""
    asked = Asked(_unit_options(options, None), only_plan=True)

    def backend(module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        return runnable(asked, Caller(), module, inputs)

    step = captured(unit.forward, backend)
    try:
        with capturing, _while_capturing(), private("without_modes")(), torch.enable_grad():
            step(*args, **kwargs)
    except OnlyPlanned as ended:
        return ended.plan.graph
    except NothingToTrain:
        return None
    except CaptureError as error:
        error.add_note(f"this is {unit.name}, a unit of fully_shard: each is captured by itself")
        raise
    return None


def _unit_options(options: Options, plan: Plan | None) -> Options:
    """The options of a unit: all of its outputs get gradients, and its plan is the one that it is given."""
    return replace(options, budget=None, plan=plan, differentiate="all", outside=0, optimizer=None)


def _while_capturing() -> ExitStack:
    stack = ExitStack()
    for each in (clear_errors(), usual_stance(), leaving_marks(), masks_as_traced()):
        stack.enter_context(each)
    return stack


@dataclass(eq=False)
class SharedRunners:
    """The functions of plans, made once for all units that torch captures as the same graph."""

    made: dict[Any, tuple[Runner, Plan | None]] = field(default_factory=dict)

    def find(self, asked: Asked, module: fx.GraphModule, inputs: Sequence[Any]) -> Runner:
        key = self.key(asked, module, inputs)
        found, _ = self.made.get(key, (None, None))
        if found is None:
            with private("without_modes")():
                found = _following(asked, module, inputs)
            if key is not None:
                self.made[key] = found, asked.options.plan  # held, so that its id stays its own
        return replace(found, inputs=asked.inputs)

    def key(self, asked: Asked, module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        """What a function depends on; None where the graph refers to tensors of its own."""
        if module.graph.find_nodes(op="get_attr") or module.graph.find_nodes(op="call_module"):
            return None
        facts = asked.inputs
        return (
            str(module.graph),
            tuple(map(_meta, inputs)),
            *(facts.roles, facts.leaves, facts.cast_once),
            tuple(tuple(sizes.items()) for sizes in facts.storages),
            *(id(asked.options.plan), asked.autocast),
        )


def _following(asked: Asked, module: fx.GraphModule, inputs: Sequence[Any]) -> Runner:
    """The runner of the plan that is wanted, or of one like it where the real step is another.

    A unit may be captured otherwise than the one that stood for its kind, or with other strides.
    """
    wanted = asked.options.plan
    assert wanted is not None
    try:
        return eager_runner(asked, module, inputs)
    except PlanMismatch:
        graph = _graph_of(replace(asked, options=replace(asked.options, plan=None)), module, inputs)
        room = choice_of(wanted)
        plans = unit_plans(graph, memory_of(graph, None).blocks)
        fitting = [plan for plan in plans if saved_by(plan) <= room.saved and plan.peak <= room.peak]
        if not fitting:
            raise
        like = min(fitting, key=lambda plan: plan.seconds)
        return eager_runner(replace(asked, options=replace(asked.options, plan=like)), module, inputs)


def _graph_of(asked: Asked, module: fx.GraphModule, inputs: Sequence[Any]) -> Graph:
    try:
        eager_runner(replace(asked, only_plan=True), module, inputs)
    except OnlyPlanned as ended:
        return ended.plan.graph
    raise CaptureError("torch captured no graph of this unit")


def _meta(item: Any) -> Any:
    if isinstance(item, torch.Tensor):
        return item.shape, item.stride(), item.dtype, item.device, item.requires_grad, item.is_leaf
    return item


@dataclass(eq=False)
class _Entry:
    """A unit captured for one shape of its arguments: torch's graph, and a step for each plan."""

    call: Callable[..., Any] = field(init=False)
    wanted: Plan = field(init=False)
    parts: dict[Any, RunnableStep] = field(default_factory=dict)


class UnitSteps:
    """The captured forwards of a unit, by the shapes of their arguments."""

    def __init__(self, unit: Unit, options: Options, caller: Caller, shared: SharedRunners) -> None:
        self.unit = unit
        self.options = options
        self.caller = caller
        self.shared = shared
        self.entries: dict[Any, _Entry] = {}

    def run(self, key: Any, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The forward by a plan."""
        entry = self.entries.get(key)
        if entry is None:
            entry = self.entries[key] = self.new_entry()
        entry.wanted = plan
        one_at_a_time = nullcontext() if entry.parts else capturing
        with one_at_a_time, _while_capturing(), without_foreign_modes():
            return entry.call(*args, **kwargs)

    def new_entry(self) -> _Entry:
        entry = _Entry()

        def backend(module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            mark_regions(module.graph)
            lay_out_calls(module)

            def call(*args: Any) -> Any:
                key = (id(module), id(entry.wanted), self.caller.autocast)
                if key not in entry.parts:
                    entry.parts[key] = self.step(entry.wanted, module, args)
                return entry.parts[key](*args)

            return with_foreign_modes(call)

        entry.call = captured(self.unit.forward, backend)
        return entry

    def step(self, plan: Plan, module: fx.GraphModule, inputs: Sequence[Any]) -> RunnableStep:
        """The step of a captured graph by a plan; autograd adds to gradients that are there already."""
        facts = replace(StepInputs.of(module, inputs), accumulating=frozenset())
        asked = Asked(_unit_options(self.options, plan), facts, autocast=self.caller.autocast)
        runner = self.shared.find(asked, module, inputs)
        return RunnableStep(asked, self.caller, replace(runner, watch=self.watch(runner, inputs)))

    def watch(self, runner: Runner, inputs: Sequence[Any]) -> Watch:
        """What may not change until the backward: inputs, and the parts that parameters are gathered from."""
        parts = {
            id(private_of(parameter, "fsdp_whole", None)): parameter.sharded_param
            for group in groups_of(self.unit.state)
            for parameter in group.fsdp_params
        }
        own, gathered = [], []
        for each in runner.watch.inputs:
            part = parts.get(id(inputs[each.place]))
            if part is None:
                own.append(each)
            elif each.again:
                gathered.append((each.name, part))
        return _GatheredWatch(own, gathered)


class _GatheredWatch(Watch):
    """Looks at inputs, and in the place of gathered parameters at the parts that they come from."""

    def __init__(self, inputs: Sequence[Watched], gathered: list[tuple[str, torch.Tensor]]) -> None:
        super().__init__(inputs)
        self.gathered = gathered

    def after_forward(self, args: Sequence[Any]) -> Callable[[Any], None] | None:
        inputs = super().after_forward(args)
        before = [private_of(part, "version") for _, part in self.gathered]

        def before_backward(node: Any) -> None:
            if inputs is not None:
                inputs(node)
            for (name, part), version in zip(self.gathered, before, strict=True):
                if private_of(part, "version") != version:
                    raise UnsupportedBackward(
                        f"{name} was written to in place (by an optimizer's step, say) between the forward "
                        "and its backward. To stay under the budget, the backward recomputes from it what "
                        "plain PyTorch would have kept, so the gradients would be wrong. Change it before "
                        "the forward or after the backward, or lowtide.uncap the model."
                    )

        return before_backward
