"""One compilation of a planned step by Inductor, ended as early as its buffers can be known.

What Inductor makes of a plan is known when it has lowered and scheduled the graphs, long before the code of
the kernels is generated and compiled. So a plan that is tight is first *drafted*: both graphs come as
far as the text around their kernels (`_torch/drafts.py`), and only where that keeps the budget are they
compiled. The texts that run are read again: those decide, and a draft that cannot be made costs nothing but
that.

Cost: a draft takes the lowering and the scheduling of both graphs, which are done once more for what is
compiled. What is in Inductor's cache is not drafted.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from ..._torch import Strides, drafted, generated_code, private, realized_where_asked, report_strides
from ...capture.joint_graph import aot_settings
from ...console.log import log, under_way
from ...devices.memory import memory_of
from ...planner.arenas import within
from ...plans.planned_step import Plan
from ...process_wide import attributes
from ...stages import Asked, Lowered
from ..backward import CompiledBackward
from ..generated_code.reader import UnreadableSourceError
from .first_step import FirstStep
from .kept_headroom import key_of_step, may_recall, read_headroom
from .peak import read_step, step_events, step_peak
from .scheduler_order import Fusions, PlannedOrder

__all__ = ["Attempt", "Lower", "Partitioner"]

_SETTINGS = {
    "reorder_for_peak_memory": False,  # the plan has an order
    "allow_buffer_reuse": False,  # a buffer that waits to be used again is one that the plan has dropped
    "realize_opcount_threshold": 256,  # the plan says what is realized, however long a loop gets
    "realize_acc_reads_threshold": 32,
}

_LOOSE = 0.7
"""A plan below this share of its budget is compiled without a draft at first. Chosen: the most that buffers
were seen to come to is 1.31 times what was predicted (DenseNet, benchmarks/compile_rounds.py)."""

Lower = Callable[[Asked, fx.GraphModule, int], Lowered]
"""The way down from Inductor's joint graph to the pair that it compiles."""


class Partitioner(private("CustomPartitionerFn")):  # type: ignore[misc]
    """Stands where Inductor asks for a forward and a backward graph.

    torch copies it and writes it into the keys of its caches; there it is a name of the plan.
    """

    def __init__(self, attempt: Attempt) -> None:
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


@dataclass(frozen=True)
class _Half:
    """One of the two graphs, as it is handed to Inductor."""

    module: fx.GraphModule
    inputs: Any
    facts: dict[str, Any]

    @property
    def is_backward(self) -> bool:
        return bool(self.facts.get("is_backward"))

    @property
    def name(self) -> str:
        return "backward" if self.is_backward else "forward"

    def compile(self, module: fx.GraphModule) -> Any:
        """What Inductor makes of it, or of a copy."""
        choices = private("inductor_now").set_choices_handler(Fusions())
        with choices, realized_where_asked():
            return private("compile_fx_inner")(module, self.inputs, **self.facts)


class _Later:
    """Stands for a compiled forward until the draft of its backward is there."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make: Callable[[], Any] | None = make
        self.compiled: Any = None
        self._boxed_call = True  # how AOTAutograd asks whether a list of arguments may be emptied

    def __call__(self, args: list[Any]) -> Any:
        return self.compiled(args)

    def now(self) -> None:
        """Compile it."""
        if self.make is not None:
            self.compiled, self.make = self.make(), None


class Attempt:
    """One compilation of a step; it is stopped where its text, or its draft, shows a peak over the budget.

    No kernel of that backward has been compiled then, and with a draft none at all. `result` is the plan with
    that peak, `turn` counts the rounds of a step. The first one begins with what an earlier process learnt of
    the step, which is kept by its `key`.
    """

    def __init__(self, asked: Asked, lower: Lower, turn: int = 1) -> None:
        self.asked = asked
        self.lower = lower
        self.turn = turn
        self.stage: Lowered | None = None
        self.name = repr(asked.options.budget)
        self.key = ""
        self.texts: dict[bool, str] = {}
        self.result: Plan | None = None
        self.stopped = False
        self.drafts = False
        self.later: _Later | None = None
        self.first_step = FirstStep()

    def lowered(self, joint: fx.GraphModule, forward_outputs: int) -> Lowered:
        """The stage of this attempt, which the compilers of its two graphs ask for afterwards."""
        if self.turn == 1 and may_recall(self.asked):
            self.key = key_of_step(self.asked, joint)
            self.asked = replace(self.asked, headroom=read_headroom(self.key))
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
        """Compile one of the two graphs; where they are drafted, the forward when both drafts are there."""
        if facts.get("is_inference"):
            self.asked.refuse_inference()
        half = _Half(module, inputs, facts)
        made = self.draft(half) if self.is_drafted(half) else None
        if not half.is_backward:
            if made is None and False in self.texts:
                self.later = _Later(lambda: self.compile_now(half))
                return self.later
            return made or self.compile_now(half)
        if True in self.texts:
            self.stop_if_over()
        if self.later is not None:
            self.later.now()
        return self.as_backward(made or self.compile_now(half))

    def is_drafted(self, half: _Half) -> bool:
        """Whether it is worth a draft to see if a plan fits its budget; both graphs have one or none."""
        if half.is_backward:
            return self.drafts
        assert self.stage is not None
        plan = self.stage.planned.plan
        self.drafts = plan.budget is not None and (self.turn > 1 or plan.timeline.peak > _LOOSE * plan.budget)
        return self.drafts

    def draft(self, half: _Half) -> Any:
        """Keep the text of a graph without compiling it; gives what was compiled, from the cache."""
        under_way(f"looking for the buffers of the {half.name}, round {self.turn}")

        def look(text: str, strides: Strides | None = None) -> None:
            self.texts[half.is_backward] = text
            if strides is not None and not half.is_backward:
                report_strides(strides)

        try:
            with drafted(look), generated_code(look):
                return half.compile(copy.deepcopy(half.module))
        except Exception as error:
            if half.is_backward not in self.texts:
                self.drafts = False  # the other one alone says nothing
                log.debug("no draft of the %s: %s", half.name, error)
            return None

    def compile_now(self, half: _Half) -> Any:
        """Compile a graph, and look at its text before its kernels are compiled."""
        under_way(f"compiling the {half.name}, round {self.turn}")

        def look(text: str) -> None:
            self.texts[half.is_backward] = text
            if half.is_backward:
                self.stop_if_over()

        with generated_code(look):
            return half.compile(half.module)

    def as_backward(self, compiled: Any) -> Any:
        """A compiled backward as autograd calls it."""
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
        """The plan, with the peak that the buffers of what was compiled come to, and what that reserves."""
        assert self.stage is not None
        planned, trace = self.stage.planned, self.stage.captured.trace
        try:
            step = read_step(
                planned.priced.lifted,
                *map(self.text, (False, True)),
                outputs=len(trace.outputs),
                tangents=trace.tangents,
                expected=trace.expected,
                device=trace.device,
            )
        except UnreadableSourceError as error:
            log.warning(f"the compiled step cannot be read ({error}): its peak is the plan's prediction")
            return planned.plan
        plan = replace(planned.plan, compiled=step_peak(step) + planned.plan.graph.fixed.get("allocator", 0))
        memory = memory_of(plan.graph, None)
        # Ranks of a process group hold different segments, and must go round as often as each other.
        if plan.budget is None or planned.any_rank is not bool:
            return plan
        return within(plan, memory, plan.budget, step_events(step))

    def text(self, backward: bool) -> str:
        if backward not in self.texts:
            raise UnreadableSourceError(f"its {'backward' if backward else 'forward'} has no text")
        return self.texts[backward]


class OverBudgetError(Exception):
    """Ends a compilation whose result would not be used."""
