"""`torch.compile(model, backend="lowtide", options={"budget": "8GiB"})`.

Registered in the entry-point group `torch_dynamo_backends`. Shapes that torch.compile traced symbolically
are planned one by one, as they come, and so are Python floats that it hands over as tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from .._torch import private
from ..console.log import say_once, say_plan
from ..errors import LowtideError
from ..options import Options, limit, relative_to
from ..pipeline.in_flight import Caller
from ..pipeline.optimizer_steps import changes, look_at_steps
from ..pipeline.runnable_step import RunnableStep, runnable
from ..planner.other_shapes import OtherShapes
from ..ranks.meeting import tell_failure
from ..stages import Asked
from ..torch_state.autocast_state import State
from .kept_plans import KeptPlans
from .whole_steps import refuse_part

__all__ = ["lowtide"]


def lowtide(
    module: torch.fx.GraphModule,
    inputs: list[Any],
    *,
    options: dict[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """The backend: plans and runs what torch.compile captured."""
    if mode not in (None, "default"):
        raise LowtideError(f'mode={mode!r} means nothing to backend="lowtide"; leave it out')
    chosen = dict(options or {})
    if "budget" not in chosen and "plan" not in chosen:
        raise LowtideError('backend="lowtide" needs options={"budget": ...}, as in {"budget": "8GiB"}')
    made = Options.make(chosen.pop("budget", None), **chosen)
    if made.step_in_backward:
        raise LowtideError(
            'step_in_backward=True is an option of lowtide.cap: what torch.compile(backend="lowtide") hands '
            "over may be a part of a step. lowtide.cap(model, budget, optimizer=..., step_in_backward=True)"
        )
    if made.dynamic is not None:
        raise LowtideError(
            'dynamic= is an option of lowtide.cap: torch.compile(backend="lowtide", dynamic=True) has its own'
        )
    _check(module, made)
    if any(isinstance(item, torch.SymInt) for item in inputs) or _floats(module):
        return _PerShape(module, made)
    return _Planned(module, inputs, made)


def _check(module: torch.fx.GraphModule, options: Options) -> None:
    """Refuse a part of a step, unless pieces are allowed; say where torch would not show a refusal."""
    if private("dynamo_config").suppress_errors:
        say_once(
            "torch._dynamo.config.suppress_errors is set: a step that Lowtide refuses, torch runs uncapped"
        )
    if not options.allow_breaks:
        refuse_part(module)


class _Planned:
    """A module of fixed shapes, planned for each state of autocast that its backward comes in.

    It is planned again when optimizer state has come that does not fit beside its plan.
    """

    def __init__(
        self,
        module: torch.fx.GraphModule,
        inputs: Any,
        options: Options,
        *,
        search: OtherShapes | None = None,
    ) -> None:
        look_at_steps(self)
        self.module = module
        self.options = options
        self.caller = Caller("this compiled step", search=search or OtherShapes())
        self.looked = changes()
        self.planned: dict[State, RunnableStep] = {}
        self.plan(inputs)

    def __call__(self, *args: Any) -> Any:
        if self.looked != changes():
            self.looked = changes()
            self.planned = {state: found for state, found in self.planned.items() if not _outgrown(found)}
        if self.caller.autocast not in self.planned:
            self.plan(args)
        return self.planned[self.caller.autocast](*args)

    def plan(self, inputs: Any) -> None:
        attempt = self.caller.next_attempt()
        asked = Asked(self.options, autocast=self.caller.autocast, attempt=attempt, search=self.caller.search)
        try:
            step = self.planned[asked.autocast] = runnable(asked, self.caller, self.module, inputs)
        except BaseException as error:
            tell_failure(attempt, error)
            raise
        if step.plan is not None:
            say_plan(step.plan)


def _outgrown(step: RunnableStep) -> bool:
    """Whether the optimizer state that is there now does not fit beside the plan, and must."""
    plan, options = step.plan, step.asked.options
    if plan is None or plan.budget is None or plan.peak + step.uncounted_state() <= plan.budget:
        return False
    if limit(options, plan) is not None:
        return True
    say_once(
        f"{relative_to(options)}: optimizer state that was made since then is not in it. The option "
        "optimizer= counts it"
    )
    return False


class _PerShape:
    """A module with symbolic shapes or floats: compiled for each set of them that it is called with."""

    def __init__(self, module: torch.fx.GraphModule, options: Options) -> None:
        self.module = module
        self.options = options
        self.floats = _floats(module)
        self.search = OtherShapes()
        self.compiled: KeptPlans[Callable[..., Any]] = KeptPlans(options.max_plans, say_once)

    def __call__(self, *given: Any) -> Any:
        args = tuple(a.item() if index in self.floats else a for index, a in enumerate(given))
        key = tuple((a.shape, a.dtype) if isinstance(a, torch.Tensor) else a for a in args)
        if key not in self.compiled:
            self.compiled.make_room(key)
            self.compiled[key] = self.compile(args)
        return self.compiled.use(key)(*_tensors(args))

    def compile(self, args: tuple[Any, ...]) -> Callable[..., Any]:
        """The module with its sizes and floats written in as numbers."""
        module = copy.deepcopy(self.module)
        for node, value in zip(module.graph.find_nodes(op="placeholder"), args, strict=True):
            if not isinstance(value, torch.Tensor):
                for holder in (*(user for user in node.users if user.target == "item"), node):
                    for user in list(holder.users):
                        _write_in(user, holder, value)
                    module.graph.erase_node(holder)
        module.recompile()
        return _Planned(module, _tensors(args), self.options, search=self.search)


def _floats(module: fx.GraphModule) -> set[int]:
    """The places of inputs that are numbers: tensors of which the graph reads nothing else."""
    nodes = module.graph.find_nodes(op="placeholder")
    return {index for index, node in enumerate(nodes) if {user.target for user in node.users} == {"item"}}


def _write_in(user: fx.Node, symbol: fx.Node, value: float) -> None:
    """Replace a symbolic size or float in a node's arguments by its number."""
    user.args, user.kwargs = fx.map_arg(  # type: ignore[assignment]
        (user.args, user.kwargs), lambda argument: value if argument is symbol else argument
    )


def _tensors(args: tuple[Any, ...]) -> list[Any]:
    return [arg for arg in args if isinstance(arg, torch.Tensor)]
