"""The Inductor executor: the planned pair of graphs as fused kernels, and the check that they keep the plan.

Inductor asks a *partitioner* for the forward and the backward graph of its own joint graph. Ours plans on
what is in memory once loops are fused, and hands over graphs in which a node may stand several times, in the
plan's order. What Inductor makes of them is read from the code that it generates, before that runs: where
it would need more than the budget, the step is planned again with less, a few times.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from ..._torch import generated_code, private, realized_where_asked
from ...capture.joint_graph import aot_settings
from ...console.log import log, under_way
from ...errors import BudgetTooSmall
from ...planner.follow import plan_too_large
from ...planner.too_small import too_small
from ...plans.planned_step import Plan
from ...process_wide import attributes
from ...stages import Asked, Lowered, Runner
from ...units import format_bytes, parse_budget
from ..backward import CompiledBackward
from ..generated_code.reader import UnreadableSourceError
from .peak import step_peak
from .scheduler_order import Fusions, PlannedOrder

__all__ = ["compiled_runner"]

_ROUNDS = 5
_SETTINGS = {
    "reorder_for_peak_memory": False,  # the plan has an order
    "allow_buffer_reuse": False,  # a buffer that waits to be used again is one that the plan has dropped
    "realize_opcount_threshold": 256,  # the plan says what is realized, however long a loop gets
    "realize_acc_reads_threshold": 32,
}


Lower = Callable[[Asked, fx.GraphModule, int], Lowered]
"""The way down from Inductor's joint graph to the pair that it compiles."""


def compiled_runner(asked: Asked, module: fx.GraphModule, inputs: Sequence[Any], lower: Lower) -> Runner:
    """The runner of a step of fused kernels, compiled until its buffers fit the budget.

    A few times at most, and the smallest plan last. Where less is asked for than the smallest plan has, one
    between it and what did not fit comes first.
    """
    smallest: Plan | None = None
    missed: Plan | None = None
    last = False
    for turn in itertools.count(1):
        attempt = _Attempt(asked, lower, turn)
        try:
            run = attempt.compile(copy.deepcopy(module), inputs)
        except BudgetTooSmall as error:
            if last or asked.only_plan:  # nothing is compiled that could show less than predicted
                raise
            last = missed is None or turn >= _ROUNDS - 1
            above = 0 if last or missed is None else missed.timeline.peak - error.smallest
            asked = replace(asked, headroom=error.budget - error.smallest - max(0, above // 2))
            continue
        except Exception:
            if not attempt.stopped:
                raise
        if attempt.stage is None:  # no gradient passes here
            return Runner(run, None, asked.inputs)
        plan = attempt.result or attempt.plan()
        stage, attempt.stage = attempt.stage, None  # Inductor keeps the attempt, and need not keep the graphs
        asked = replace(asked, sketched=stage.captured.asked.sketched)  # the choice of this round
        if plan.budget is None or plan.peak <= plan.budget:
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


class FirstStep:
    """The first step of a compiled plan on a GPU, where libraries take memory of their own: it is watched.

    `over` is how far the device's allocator was above the budget then.
    """

    def __init__(self) -> None:
        self.plan: Plan | None = None
        self.over = 0
        self.done = False

    def watching(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """The function of the step, with the allocator's peak counted from its first call on."""
        device = self.device
        if device is None:
            return run

        def call(*args: Any) -> Any:
            if not self.done:
                torch.cuda.reset_peak_memory_stats(device)
            return run(*args)

        return call

    @property
    def device(self) -> torch.device | None:
        """The GPU that is watched."""
        where = torch.device("cpu" if self.plan is None else self.plan.graph.device)
        return where if where.type == "cuda" else None

    def look(self) -> None:
        """Called after the backward."""
        if self.done or self.plan is None or self.device is None:
            return
        self.done = True
        if self.plan.budget is not None:
            self.over = max(0, torch.cuda.max_memory_allocated(self.device) - self.plan.budget)


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


class Partitioner(private("CustomPartitionerFn")):  # type: ignore[misc]
    """Stands where Inductor asks for a forward and a backward graph.

    torch copies it and writes it into the keys of its caches; there it is a name of the plan.
    """

    def __init__(self, attempt: _Attempt) -> None:
        self.attempt = attempt

    def __call__(
        self, joint: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **_: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        joint.graph = private("fx_graph_cse")(joint.graph)
        stage = self.attempt.lowered(joint, num_fwd_outputs)
        return stage.forward, stage.backward

    def uuid(self) -> str:
        """A name of the plan: a compiled graph in a cache is for this plan and no other."""
        return "lowtide " + hashlib.sha256(self.attempt.name.encode()).hexdigest()

    def __deepcopy__(self, memo: Any) -> Partitioner:
        return self

    def __reduce__(self) -> Any:
        return (str, (self.uuid(),))


class _Attempt:
    """One compilation of a step; it is stopped where the text of the backward shows a peak over the budget.

    No kernel of that backward has been compiled then. `result` is the plan with that peak.
    """

    def __init__(self, asked: Asked, lower: Lower, turn: int = 1) -> None:
        self.asked = asked
        self.lower = lower
        self.turn = turn
        self.stage: Lowered | None = None
        self.name = repr(asked.options.budget)
        self.texts: dict[bool, str] = {}
        self.result: Plan | None = None
        self.stopped = False
        self.first_step = FirstStep()

    def lowered(self, joint: fx.GraphModule, forward_outputs: int) -> Lowered:
        """The stage of this attempt, which the compilers of its two graphs ask for afterwards."""
        self.stage = self.lower(self.asked, joint, forward_outputs)
        plan = self.stage.planned.plan
        self.name += (
            plan.schedule.to_json() + plan.graph.fingerprint + repr((plan.sketched, plan.trimmed, plan.split))
        )
        return self.stage

    def compile(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        settings = {
            **_SETTINGS,
            "custom_partitioner_fn": Partitioner(self),
            "_post_fusion_custom_pass": PlannedOrder(),
        }
        # A step from AOTAutograd's own cache would come without a plan, and a backward that is compiled only
        # when it is called could not be checked beforehand.
        choices = {
            "enable_autograd_cache": False,
            "force_non_lazy_backward_lowering": True,
            **aot_settings(self.asked.autocast),
        }
        with attributes(private("functorch_config"), **choices):
            run = private("compile_fx")(
                module, list(inputs), inner_compile=self.compile_graph, config_patches=settings
            )
        return run  # type: ignore[no-any-return]

    def compile_graph(self, module: fx.GraphModule, inputs: Any, **facts: Any) -> Any:
        """Compile one of the two graphs, and look at its text before its kernels are compiled."""
        backward = bool(facts.get("is_backward"))
        under_way(f"compiling the {'backward' if backward else 'forward'}, round {self.turn}")
        if facts.get("is_inference"):
            self.asked.refuse_inference()

        def look(text: str) -> None:
            self.texts[backward] = text
            if backward:
                self.stop_if_over()

        choices = private("inductor_now").set_choices_handler(Fusions())
        with choices, generated_code(look), realized_where_asked():
            compiled = private("compile_fx_inner")(module, inputs, **facts)
        if not backward:
            return compiled
        assert self.stage is not None
        captured = self.stage.captured
        tangents = [node.meta["val"] for node in captured.trace.tangents]
        plan = self.result or self.stage.planned.plan
        return CompiledBackward(compiled, captured.expected, tangents, plan).boxed(after=self.first_step.look)

    def stop_if_over(self) -> None:
        self.result = self.plan()
        if self.result.budget is not None and self.result.peak > self.result.budget:
            self.stopped = True
            raise OverBudgetError

    def plan(self) -> Plan:
        """The plan, with the peak that the buffers of what was compiled come to."""
        assert self.stage is not None
        plan, trace = self.stage.planned.plan, self.stage.captured.trace
        try:
            peak = step_peak(
                self.stage.planned.priced.lifted,
                *map(self.text, (False, True)),
                outputs=len(trace.outputs),
                tangents=trace.tangents,
                expected=trace.expected,
                device=trace.device,
            )
        except UnreadableSourceError as error:
            log.warning(f"the compiled step cannot be read ({error}): its peak is the plan's prediction")
            return plan
        return replace(plan, compiled=peak + plan.graph.fixed.get("allocator", 0))

    def text(self, backward: bool) -> str:
        if backward not in self.texts:
            raise UnreadableSourceError(f"its {'backward' if backward else 'forward'} has no text")
        return self.texts[backward]


class OverBudgetError(Exception):
    """Ends a compilation whose result would not be used."""
