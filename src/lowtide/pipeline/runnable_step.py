"""One graph that torch handed over: the runner of its last round, and its calls until their backward."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from .._torch import first_run_unwatched, untraced
from ..capture.conditions import Conditions, cut_conditions
from ..capture.rewrites.autocast import mark_regions
from ..capture.rewrites.random_draws import lay_out_calls
from ..capture.step_inputs import StepInputs
from ..console.log import under_way
from ..console.stage_seconds import timed
from ..devices.optimizers import state_bytes
from ..errors import CaptureError
from ..options import limit
from ..planner.under_budget import get_ready
from ..plans.planned_step import Plan
from ..run.arena import let_state_come, prepare
from ..run.backward import only_once
from ..run.handing import Departures
from ..run.out_of_memory import explain
from ..stages import Asked, Runner
from ..torch_state.autocast_state import present_state
from ..torch_state.garbage import uncollected
from .eager_step import eager_runner
from .in_flight import Call, Caller, keep_account, refuse_if_over
from .optimizer_steps import seen_for
from .stepping import Stepping, refuse_ranks, stepping_optimizers
from .way_down import lowered

__all__ = ["RunnableStep", "runnable"]


def runnable(
    asked: Asked,
    caller: Caller,
    module: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    asked_of: Sequence[int] = (),
) -> RunnableStep:
    """What runs a graph of torch's: it takes and gives what the module does.

    `asked_of` are the inputs that are looked at before it is called, besides those that it looks at itself.
    """
    conditions = cut_conditions(module)
    if conditions is not None and conditions.draw is not None and asked.compiled:
        raise CaptureError(
            "a branch of the step depends on a random number, and compiled code draws others than plain "
            'PyTorch: executor="eager" follows it, or set the rate of dropped layers to zero '
            "(config.layerdrop = 0)"
        )
    if not torch.is_grad_enabled():
        return RunnableStep(asked, caller, Runner(module.forward, None, asked.inputs), conditions)
    optimizers = stepping_optimizers(asked.options)
    if optimizers:
        refuse_ranks()
    places = conditions.places if conditions else asked_of
    asked = replace(
        asked,
        inputs=StepInputs.of(module, inputs, asked_of=places, optimizers=optimizers),
        called_in=present_state(),
        released=caller.holds.released,
    )
    mark_regions(module.graph)
    stepping = Stepping(caller, optimizers, asked.inputs.names) if optimizers else None
    get_ready()
    with uncollected():
        runner = _first_runner(asked, caller, module, inputs)
    return RunnableStep(asked, caller, runner, conditions, stepping)


def _first_runner(asked: Asked, caller: Caller, module: fx.GraphModule, inputs: Sequence[Any]) -> Runner:
    if asked.compiled:
        from ..run.inductor.step import compiled_runner  # Inductor takes a second to import

        return compiled_runner(asked, module, inputs, lowered)
    lay_out_calls(module)
    return eager_runner(asked, module, inputs, caller.holds)


@dataclass
class RunnableStep:
    """A whole step, or what lies between two graph breaks. A later round puts another runner in its place."""

    asked: Asked
    caller: Caller
    runner: Runner = field(repr=False)
    conditions: Conditions | None = None
    stepping: Stepping | None = field(default=None, repr=False)
    ran: bool = field(default=False, repr=False)
    prepared: Plan | None = field(default=None, repr=False)

    @property
    def plan(self) -> Plan | None:
        """The plan of the last round; None where no gradient passes."""
        return self.runner.plan

    @property
    def inputs(self) -> StepInputs:
        """What is known of the inputs that the plan was made for."""
        return self.runner.inputs

    def __call__(self, *args: Any) -> Any:
        if self.conditions is not None:
            self.conditions.must_hold(args)
        self.runner = self.runner.renew(args) or self.runner
        if self.plan is None:
            return self.runner.run(*args)
        if not self.asked.options.allow_breaks:
            refuse_if_over(self.caller, self.plan)
        if self.stepping is not None:
            self.stepping.before_call()
        departures = Departures(self.runner.groups) if self.runner.groups else None
        given = args if departures is None else departures.inputs(args)
        told = nullcontext() if self.ran else timed("first forward")
        if not self.ran:
            under_way("running this step for the first time")
        foretold = None if self.ran or self.conditions is None else self.conditions.state_after()
        let_state_come(self.asked.options.optimizer)
        if self.plan is not self.prepared:
            prepare(self.plan)
            self.prepared = self.plan
        try:
            with told, first_run_unwatched() if self.runner.casts_inside else nullcontext():
                results = self.runner.run(*given)
        except RuntimeError as error:
            explain(error, self.plan, "forward")
            raise
        if self.conditions is not None:
            self.conditions.must_have_drawn(foretold)
        self.ran = True
        node = backward_node(results, given)
        if node is not None:
            node.set_materialize_grads(False)  # the backward sees which gradients do not come
            self.follow_up(node, args)
            if departures is not None:
                node.register_prehook(departures.announce)
            if self.stepping is not None:
                self.stepping.after_call(node, args, self.runner.updated)
        for deferral, places in self.runner.deferred:
            results = deferral.fill(results, [args[place] for place in places])
        return results

    def follow_up(self, node: Any, args: Sequence[Any]) -> None:
        """What is looked at when autograd calls the backward of one call."""
        broken = self.asked.options.allow_breaks  # then a backward may run where torch captures what runs
        once, check = only_once(self.caller.name), self.runner.watch.after_forward(args)
        node.register_prehook(untraced(once) if broken else once)
        if check is not None:
            node.register_prehook(untraced(check) if broken else check)
        if self.runner.returned is not None:
            self.runner.returned.look(node, self.caller.holds, self.caller.name)
        options, plan = self.asked.options, self.plan
        if plan is not None and not options.allow_breaks:  # the parts of a broken call are one call
            keep_account(node, Call(self.caller, plan, self.asked.autocast, limit(options, plan)))

    def uncounted_state(self) -> int:
        """The bytes of optimizer state that are there now and that the plan does not count."""
        if self.plan is None:
            return 0
        device, total = torch.device(self.plan.graph.device), 0
        for one, optimizer in seen_for(self.inputs.trained, device):
            before = self.runner.counted.get(one, one.at_first if device.type == "cuda" else 0)
            total += max(0, state_bytes(optimizer, device) - before)
        return total


def backward_node(results: Any, args: Sequence[Any]) -> Any:
    """Autograd's node for the step; None where no result needs a gradient.

    From a result that is a view of an input one gets to the node of what made that input, which is another.
    """
    for result in results if isinstance(results, list | tuple) else [results]:
        node: Any = result.grad_fn if isinstance(result, torch.Tensor) else None
        for _ in range(4):
            if hasattr(node, "set_materialize_grads"):
                if not any(isinstance(arg, torch.Tensor) and arg.grad_fn is node for arg in args):
                    return node
                break
            node = node.next_functions[0][0] if node is not None and node.next_functions else None
    return None
