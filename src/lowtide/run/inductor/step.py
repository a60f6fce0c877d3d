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
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from ..._torch import generated_code, private, realized_where_asked
from ...console.log import log
from ...errors import BudgetTooSmall
from ...planner.follow import plan_too_large
from ...planner.too_small import too_small
from ...plans.planned_step import Plan
from ...units import format_bytes, parse_budget
from ..backward import CompiledBackward
from ..generated_code.reader import UnreadableSourceError
from .peak import step_peak
from .scheduler_order import Fusions, PlannedOrder

if TYPE_CHECKING:
    from ...pipeline.pipeline import Piece

__all__ = ["CompiledStep"]

_ROUNDS = 5
_SETTINGS = {
    "reorder_for_peak_memory": False,  # the plan has an order
    "allow_buffer_reuse": False,  # a buffer that waits to be used again is one that the plan has dropped
    "realize_opcount_threshold": 256,  # the plan says what is written down, however long a loop gets
    "realize_acc_reads_threshold": 32,
}


class CompiledStep:
    """A step of fused kernels; it is planned again where it needs more than its budget.

    What the generated code allocates is known before it runs. On a GPU, where libraries take memory of their
    own, the first step is watched as well.
    """

    def __init__(self, piece: Piece, module: fx.GraphModule, inputs: Sequence[Any]) -> None:
        self.piece = piece
        self.module = module
        self.device = torch.device("cpu")
        self.watched = False
        self.over = 0
        self.run = self.compile(inputs)

    def __call__(self, *args: Any) -> Any:
        if self.over:
            self.leave_more(self.over)
            self.over = 0
            self.run = self.compile(args)
        if not self.watched and self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        return self.run(*args)

    def compile(self, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile until the buffers fit the budget; a few times at most, and the smallest plan last.

        Where less is asked for than the smallest plan has, one between it and what did not fit comes first.
        """
        smallest: Plan | None = None
        missed: Plan | None = None
        last = False
        for turn in itertools.count(1):
            attempt = _Attempt(self)
            try:
                run = attempt.compile(copy.deepcopy(self.module), inputs)
            except BudgetTooSmall as error:
                if last or self.piece.only_plan:  # nothing is compiled that could show less than predicted
                    raise
                last = missed is None or turn >= _ROUNDS - 1
                above = 0 if last or missed is None else missed.timeline.peak - error.smallest
                self.piece.headroom = error.budget - error.smallest - max(0, above // 2)
                continue
            except Exception:
                if not attempt.stopped:
                    raise
            if self.piece.plan is None:  # no gradient passes here
                return run
            plan = self.piece.plan = attempt.result or attempt.plan()
            self.device = torch.device(plan.graph.device)
            self.piece.trace = self.piece.lifted = None
            if plan.budget is None or plan.peak <= plan.budget:
                return run
            if self.piece.options.plan is not None:
                raise plan_too_large(plan, self.piece.options.budget)
            smallest = plan if smallest is None or plan.peak < smallest.peak else smallest
            missed = plan
            if last:
                break
            self.leave_more(plan.peak - plan.budget, all_of_it=turn >= _ROUNDS - 1)
        assert smallest is not None
        assert smallest.budget is not None
        raise too_small(smallest, self.piece.options.budget or parse_budget(smallest.budget), smallest.budget)

    def leave_more(self, over: int, *, all_of_it: bool = False) -> None:
        """Plan for less from now on: for a peak that is lower than this plan's by more than was missing."""
        plan = self.piece.plan
        assert plan is not None
        assert plan.budget is not None
        missing = format_bytes(over)
        log.info(f"the compiled step needs {missing} more than its budget: planning again with less")
        wanted = 0 if all_of_it else plan.timeline.peak - over - (over >> 2)
        self.piece.headroom = max(self.piece.headroom + 1, plan.budget - wanted)

    def look_at_first_step(self) -> None:
        """Called behind the backward: note how far the device's allocator was above the budget."""
        plan = self.piece.plan
        if self.watched or plan is None or self.device.type != "cuda":
            return
        self.watched = True
        peak = torch.cuda.max_memory_allocated(self.device)
        if plan.budget is not None and peak > plan.budget:
            self.over, self.watched = peak - plan.budget, False


class Partitioner(private("CustomPartitionerFn")):  # type: ignore[misc]
    """Stands where Inductor asks for a forward and a backward graph.

    torch copies it and writes it into the keys of its caches; there it is a name of the plan.
    """

    def __init__(self, piece: Piece) -> None:
        self.piece = piece

    def __call__(
        self, joint: fx.GraphModule, inputs: Any, **facts: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        joint.graph = private("fx_graph_cse")(joint.graph)
        return self.piece.partition(joint, inputs, **facts)

    def uuid(self) -> str:
        """A name of the plan: a compiled graph in a cache serves this plan and no other."""
        plan = self.piece.plan
        text = repr(self.piece.options.budget)
        if plan is not None:
            text += plan.schedule.to_json() + plan.graph.fingerprint + repr((plan.sketched, plan.trimmed))
        return "lowtide " + hashlib.sha256(text.encode()).hexdigest()

    def __deepcopy__(self, memo: Any) -> Partitioner:
        return self

    def __reduce__(self) -> Any:
        return (str, (self.uuid(),))


class _Attempt:
    """One compilation of a piece; it is stopped where the text of the backward shows a peak over the budget.

    No kernel of that backward has been compiled then. `result` is the plan with that peak.
    """

    def __init__(self, step: CompiledStep) -> None:
        self.step = step
        self.piece = step.piece
        self.texts: dict[bool, str] = {}
        self.result: Plan | None = None
        self.stopped = False

    def compile(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        settings = {
            **_SETTINGS,
            "custom_partitioner_fn": Partitioner(self.piece),
            "_post_fusion_custom_pass": PlannedOrder(),
        }
        # A step from AOTAutograd's own cache would come without a plan, and a backward that is compiled only
        # when it is called could not be checked beforehand.
        choices = {
            "enable_autograd_cache": False,
            "force_non_lazy_backward_lowering": True,
            **self.piece.choices,
        }
        with private("functorch_config").patch(choices):
            run = private("compile_fx")(
                module, list(inputs), inner_compile=self.compile_graph, config_patches=settings
            )
        return run  # type: ignore[no-any-return]

    def compile_graph(self, module: fx.GraphModule, inputs: Any, **facts: Any) -> Any:
        """Compile one of the two graphs, and look at its text before its kernels are compiled."""
        backward = bool(facts.get("is_backward"))
        if facts.get("is_inference"):
            self.piece.refuse_inference()

        def look(text: str) -> None:
            self.texts[backward] = text
            if backward:
                self.stop_if_over()

        choices = private("inductor_now").set_choices_handler(Fusions())
        with choices, generated_code(look), realized_where_asked():
            compiled = private("compile_fx_inner")(module, inputs, **facts)
        if not backward:
            return compiled
        whole = CompiledBackward(compiled, self.piece.expected, self.piece.tangents)
        return whole.boxed(after=self.step.look_at_first_step)

    def stop_if_over(self) -> None:
        self.result = self.plan()
        if self.result.budget is not None and self.result.peak > self.result.budget:
            self.stopped = True
            raise OverBudgetError

    def plan(self) -> Plan:
        """The plan, with the peak that the buffers of what was compiled come to."""
        piece = self.piece
        assert piece.plan is not None
        assert piece.lifted is not None
        assert piece.trace is not None
        try:
            peak = step_peak(
                piece.lifted,
                *map(self.text, (False, True)),
                outputs=len(piece.trace.outputs),
                tangents=piece.trace.tangents,
                expected=piece.trace.expected,
                device=piece.trace.device,
            )
        except UnreadableSourceError as error:
            log.warning(f"the compiled step cannot be read ({error}): its peak is the plan's prediction")
            return piece.plan
        return replace(piece.plan, compiled=peak + piece.plan.graph.fixed.get("allocator", 0))

    def text(self, backward: bool) -> str:
        if backward not in self.texts:
            raise UnreadableSourceError(f"its {'backward' if backward else 'forward'} has no text")
        return self.texts[backward]


class OverBudgetError(Exception):
    """Ends a compilation whose result would not be used."""
