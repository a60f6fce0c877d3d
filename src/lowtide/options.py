"""What a user may choose besides the budget; the same for `cap`, `plan`, `verify` and the backend."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .arguments import flag, kind_of, one_of, whole
from .devices.optimizers import each_optimizer
from .errors import BudgetError, LowtideError
from .plans.patience import PLANNING_SECONDS, check_seconds
from .plans.planned_step import Plan
from .solve import find_method
from .units import Budget, parse_budget

__all__ = ["Options", "limit", "relative_to"]

_CHOICES = {
    "executor": ("eager", "inductor"),
    "prices": ("measured", "roofline"),
    "differentiate": ("auto", "all"),
    "outputs": ("auto", "held", "free"),
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to plan and run a step.

    - `executor`: "eager" runs the schedule op by op, exactly as planned; "inductor" compiles it into fused
      kernels, planned again where they need more than the budget.
    - `method`: the solver; "auto" unless you compare.
    - `prices`: "measured" on the device, or "roofline" from a table.
    - `differentiate`: "auto" plans for the gradient of the scalar outputs where there are any (a loss), of
      all outputs otherwise; "all" plans for all.
    - `optimizer`: announces state that is not there yet, so that the budget covers it; one, wrapped or not,
      or a list.
    - `step_in_backward`: let the optimizer update each parameter inside of the backward, as soon as its
      gradient is complete, and let the gradient go (docs/step-in-backward.md).
    - `outside`: bytes that the caller holds between forward and backward besides the outputs: a loss computed
      outside of the step. "auto" sets aside twice what the differentiated outputs take, which is what
      cross-entropy needs, under autocast in single precision; nothing where the loss is inside.
    - `outputs`: who holds what the step returns while its backward runs. "auto" counts it as held, looks when
      the first backward begins, and plans for what the caller does from the next call on; "held" counts it
      to the end; "free" counts on nobody holding it, and refuses a backward where somebody does and that does
      not fit. For the eager executor; elsewhere it counts as held.
    - `allow_breaks`: plan the pieces of a step that is not one graph, together once the first call has shown
      them, and leave what is between them as it is (docs/limits.md).
    - `split`: True lets regions of the step run a chunk of rows at a time where the budget needs it (the head
      and the loss of a language model, its MLPs), so that logits are never there as a whole; a number is that
      of the chunks. Gradients are then equal to rounding; without it they are bitwise the same.
    - `plan`: a plan to follow instead of making one. It must keep to the budget, or without one to its own.
    - `max_plans`: how many shapes to keep plans for. The oldest goes; where shapes come back whose plans were
      let go, as many more are kept.
    - `dynamic`: the sizes that change from batch to batch, as in {"input_ids": 1} or {0: [0, 1]}: an argument
      by name or position, a key of a dict among them, and one dimension or several. They are symbols from the
      first capture on; without it from the second shape on, for those that have changed. False captures each
      shape by itself (docs/changing-shapes.md).
    - `planning_seconds`: how long the search for one plan may take; the best until then is taken.

    >>> import lowtide, torch
    >>> model = lowtide.cap(torch.nn.Linear(4, 4), "1MiB", prices="roofline", differentiate="all")
    """

    budget: Budget | None = None
    executor: str = "eager"
    method: str = "auto"
    prices: str = "measured"
    differentiate: str = "auto"
    optimizer: Any = None
    step_in_backward: bool = False
    outside: int | str = "auto"
    outputs: str = "auto"
    allow_breaks: bool = False
    split: bool | int = False
    plan: Plan | None = None
    max_plans: int = 16
    dynamic: Any = None
    planning_seconds: float = PLANNING_SECONDS

    @classmethod
    def make(cls, budget: int | str | Budget | None, **choices: Any) -> Options:
        """Options from what a user wrote; an unknown name or value is refused by name."""
        known = {field.name for field in dataclasses.fields(cls)} - {"budget"}
        for name in choices:
            if name not in known:
                raise LowtideError(
                    f"option {name!r} is not known; known are {', '.join(sorted(known))}. An argument of the "
                    f'model goes into kwargs={{"{name}": ...}} of plan and verify'
                )
        made = cls(budget=None if budget is None else parse_budget(budget), **choices)
        made._check()
        return made

    def _check(self) -> None:
        for name, values in _CHOICES.items():
            one_of(name, getattr(self, name), values)
        find_method(self.method)
        if not isinstance(self.outside, int | str) or isinstance(self.outside, bool):
            raise LowtideError(f'outside={self.outside!r} must be a number of bytes or "auto"')
        if self.outside not in ("auto", 0):
            try:
                outside = parse_budget(self.outside).bytes
            except BudgetError as error:
                raise LowtideError(f"outside={self.outside!r}: {error}") from None
            if outside is None:
                raise LowtideError(f'outside={self.outside!r} must be a number of bytes or "auto"')
            object.__setattr__(self, "outside", outside)
        self._check_optimizers()
        if self.outputs == "free" and (self.executor != "eager" or self.allow_breaks):
            raise LowtideError(
                'outputs="free" is for the eager executor and steps of one graph; leave it out: with '
                'executor="inductor" or allow_breaks=True what a step returns counts as held'
            )
        for name in ("allow_breaks", "step_in_backward"):
            flag(name, getattr(self, name))
        if self.step_in_backward:
            self._check_step_in_backward()
        if not isinstance(self.split, int) or (not isinstance(self.split, bool) and self.split < 2):
            raise LowtideError(f"split={self.split!r} must be True, False, or a number of chunks >= 2")
        whole("max_plans", self.max_plans)
        self._check_dynamic()
        check_seconds(self.planning_seconds)
        if self.plan is not None:
            kind_of("plan=", self.plan, Plan, "a lowtide.Plan")
        if self.plan is not None and self.budget is not None and self.budget.word in ("min", "knee"):
            sort = "smallest plan" if self.budget.word == "min" else "plan at the knee"
            raise LowtideError(
                f'budget "{self.budget}" asks for the {sort}, plan= for the one that is given: leave one of '
                'them out, or write a budget that the plan must keep to, as in "8GiB"'
            )

    def _check_step_in_backward(self) -> None:
        if self.executor == "inductor":
            raise LowtideError(
                'step_in_backward=True cannot be used with executor="inductor": a compiled backward gives '
                'all gradients at its end. Take executor="eager", or leave step_in_backward out'
            )
        if self.allow_breaks:
            raise LowtideError(
                "step_in_backward=True cannot be used with allow_breaks=True: a parameter that two pieces of "
                "a step read has its gradient when both have run. Cap a part that is one graph, or leave "
                "step_in_backward out"
            )

    def _check_dynamic(self) -> None:
        told = self.dynamic
        if told is None or told is False:
            return
        if not isinstance(told, Mapping) or not told or not all(map(_is_dimensions, told, told.values())):
            raise LowtideError(
                f'dynamic={told!r} must be a dict of arguments and dimensions, as in {{"input_ids": 1}} or '
                "{0: [0, 1]}, or False"
            )
        if self.allow_breaks:
            raise LowtideError(
                "dynamic= cannot be used with allow_breaks=True, whose pieces are captured for each shape: "
                "leave one of them out"
            )

    def _check_optimizers(self) -> None:
        none = isinstance(self.optimizer, list | tuple) and not self.optimizer
        given = [self.optimizer] if none else each_optimizer(self.optimizer)
        for one in given:
            if isinstance(one, type) or not hasattr(one, "param_groups") or not hasattr(one, "step"):
                raise LowtideError(
                    "optimizer= takes a torch.optim.Optimizer, as in torch.optim.AdamW(model.parameters()), "
                    f"or a list of some, not {getattr(one, '__name__', repr(one))}"
                )


def _is_dimensions(name: Any, dimensions: Any) -> bool:
    """Whether an argument and its dimensions are written as they may be."""
    listed = dimensions if isinstance(dimensions, list | tuple) else [dimensions]
    numbers = [name, *listed] if not isinstance(name, str) else listed
    return bool(listed) and all(isinstance(each, int) and not isinstance(each, bool) for each in numbers)


def limit(options: Options, plan: Plan | None) -> int | None:
    """The bytes that a planned step may take together with what comes later, None where nothing says so.

    A share of the step's own uncapped peak, and its knee, limit the step alone; bytes, shares of the device's
    memory and "free" limit all that is there.
    """
    budget = options.budget
    if plan is None or (budget is not None and budget.is_relative):
        return None
    return plan.budget


def relative_to(options: Options) -> str:
    """What a share is of, in words, for what is said where `limit` gives nothing."""
    of = "the knee" if options.budget is not None and options.budget.is_knee else "of the uncapped peak"
    return f"the budget {options.budget} is {of} of one call, as it was planned"
