"""A capped callable: one plan per shape of its arguments, made at the first training call.

Calls in eval mode or without gradients run plainly.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from .._torch import (
    RECAPTURES,
    in_process_group,
    is_made_of_others,
    outside_dynamo,
    private,
    sizes_marked,
    usual_stance,
)
from ..capture.branches import following_branches
from ..capture.conditions import OtherData
from ..capture.joint_graph import capturing
from ..capture.rewrites.recurrent import are_captured
from ..capture.torch_errors import CAPPED_INSIDE, clear_errors
from ..console.log import log, planning, say_plan
from ..console.stage_seconds import timed
from ..errors import BudgetTooSmall, CaptureError, LowtideError, PlanMismatch
from ..measuring.trial import Trial, modules_of
from ..options import Options
from ..pipeline.compiled_calls import captured, tensors_of_call, unmarked
from ..pipeline.in_flight import Caller, too_many
from ..pipeline.optimizer_steps import stepped_since_call
from ..pipeline.runnable_step import RunnableStep
from ..plans.planned_step import Plan
from ..process_wide import lock, nothing_left
from ..ranks.meeting import all_failed, tell_failure
from ..sketching.marker import leaving_marks
from ..torch_state.dispatch_modes import without_foreign_modes
from ..torch_state.garbage import uncollected
from ..units import format_bytes
from .any_size import AnySize, Kin, OneSizeOnly, Shared
from .broken_steps import Pieces, are_joined
from .entries import Entry, backend_for, backend_of_kin, graphs_of_this_call, key_of, present_graphs
from .first_call import BackwardInside, install, may_install
from .in_backward import refuse_unless_it_can_step
from .kept_plans import KeptPlans
from .more_than_planned import bytes_of_calls, gradients_are_more, state_is_more
from .problem_type import settle_problem_type
from .told_sizes import told_sizes
from .whole_steps import (
    forced_eager,
    refuse_lazy,
    refuse_what_is_not_captured,
)

__all__ = ["IN_A_LOOP", "Capped"]

IN_A_LOOP = (
    ". Where a graph breaks in a loop, torch leaves the whole function to Python, and captures what that "
    "calls: give what is in the loop a module or function of its own"
)

MANY_CAPTURES = 8
"""How often a step is captured for the same shapes before that is said; chosen."""

Answers = tuple[tuple[bool, ...], ...]
"""What a batch answers to the branches of steps that were captured before, one step after the other."""


class Capped:
    """Calls a function under a budget. `plan` is the one of the last training call."""

    def __init__(
        self, function: Callable[..., Any], options: Options, *, module: torch.nn.Module | None = None
    ) -> None:
        refuse_unless_it_can_step(options)
        self.function = function
        self.options = options
        self.module = module
        self.plan: Plan | None = None
        self.entries: KeptPlans[Entry] = KeptPlans(options.max_plans, self.say, counts=_is_planned)
        self.any_size = AnySize(self.name, options.max_plans)
        self.lock = lock()
        self.said: set[str] = set()
        self.caller = Caller(self.name)
        self.calls = 0
        self.granted = 0
        self.when_refused: Callable[[], None] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The call, planned where it trains; torch.compile around it breaks its graph here."""
        return _outside(self, *args, **kwargs)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        if not self.trains():
            return self.function(*args, **kwargs)
        try:
            return self.training_call(args, kwargs)
        except LowtideError:
            if self.when_refused is not None:
                self.when_refused()
            raise

    def training_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if present_graphs() is not None:
            raise CaptureError(f"{CAPPED_INSIDE}: a step has one budget. lowtide.uncap one of the two")
        refuse_what_is_not_captured()
        if not self.calls:
            settle_problem_type(self.modules(), kwargs.get("labels"))
        answers: Answers = ()
        while True:
            try:
                return self.call_of(answers, args, kwargs)
            except OtherData as other:  # the next one is of such data, or is captured with this batch
                answers = (*answers, other.answers)
                if other.drawn:
                    self.say(
                        "which parts of the step run is drawn anew at each call (LayerDrop, say): every "
                        "combination that comes up is captured and planned by itself, and counts in "
                        "max_plans. With a rate of zero it is one plan"
                    )

    def call_of(self, answers: Answers, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One call of the step that is captured for some answers to its branches on data."""
        try:
            entry = self.entry(args, kwargs, answers)
        except BudgetTooSmall as error:  # of pieces, which are planned when they have been seen
            entry = self.entry_of_a_larger(error, args, kwargs, answers)
        try:
            return self.run(entry, args, kwargs)
        except BudgetTooSmall as error:
            return self.run(self.entry_of_a_larger(error, args, kwargs, answers), args, kwargs)
        except PlanMismatch as error:
            if answers:
                error.add_note("the batch is of other data than the first one: it is padded, say, or not")
            raise
        except CaptureError as error:
            planned = any(part.plan for part in entry.parts)
            if entry.shared is not None and (isinstance(error, OneSizeOnly) or not planned):
                entry.shared.kin.refuse(str(error))
                self.forget(entry)
                return self.call_of(answers, args, kwargs)
            if planned:
                raise
            installed = self.install(error, entry.attempt, args, kwargs)
        result = self.run(self.entry(args, kwargs, answers), args, kwargs)
        self.say(f"captured at the second try: the first call of {self.name} {installed}")
        return result

    def run(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One call of a compiled step, which plans it where it is new."""
        before = len(entry.parts)
        uncounted = entry.uncounted()
        entry.ran = []
        if not before:
            entry.attempt = self.caller.next_attempt()
        try:
            with (
                nothing_left(),
                graphs_of_this_call(entry),
                self.one_at_a_time(entry),
                self.marked(entry, args, kwargs),
                nullcontext() if entry.parts else planning(),
                nullcontext() if entry.parts else uncollected(),
                nullcontext() if entry.parts else timed("torch.compile's front end"),
                clear_errors(),
                without_foreign_modes(ours=entry.pieces is None),
                usual_stance(),
                leaving_marks(),
                following_branches(on=entry.branches),
                nullcontext(_ignore) if entry.pieces is None else entry.pieces.call((args, kwargs)) as end,
            ):
                result = entry.call(*args, **kwargs)  # type: ignore[misc]
            end(result)
        except OtherData:
            if entry.shared is None:
                self.forget_failed(entry)
            raise
        except BaseException as error:
            self.forget_failed(entry)
            if not entry.parts:
                tell_failure(entry.attempt, error)
            if isinstance(error, BudgetTooSmall) and entry.beside:
                raise too_many(self.caller, error.budget) from None
            raise
        self.calls += 1
        self.plan = entry.plan_with(uncounted) or self.plan
        self.granted = max(self.granted, (self.plan and self.plan.budget) or 0)
        if entry.plan is None:
            self.say(f"torch captured nothing of this step to plan: it ran plainly, without a cap{IN_A_LOOP}")
        if not before and entry.shared is not None:
            with self.lock:
                self.entries.make_room(entry.key, more=0)
        if len(entry.parts) > before:
            self.say_plans(entry.parts[before:])
            self.count_capture(entry)
        return result

    def count_capture(self, entry: Entry) -> None:
        """Warn, long before it is refused, of a step that is captured at every call."""
        entry.captures += 1
        if entry.captures == MANY_CAPTURES:
            self.say(
                f"{self.name} was captured {MANY_CAPTURES} times for calls that are alike: something that it "
                "reads changes (a Python number or flag, what .item() gives), and each of its values is a "
                f"step of its own. After {RECAPTURES} captures it is refused; a tensor in the place of that "
                "number, as a buffer, is captured once"
            )

    def marked(
        self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> AbstractContextManager[Any]:
        """Tell torch's front end which sizes change, where it may capture for all of them; else of none."""
        if entry.shared is not None and not entry.parts:
            return sizes_marked(entry.shared.kin.marks(tensors_of_call(args, kwargs)))
        return unmarked(args, kwargs)

    def install(
        self, error: CaptureError, attempt: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> str:
        """Run a step that torch could not capture plainly, for what its first call installs, in words.

        Raises what the step itself raises, or the error where a second try would not help.
        """
        if error.__cause__ is None or error.for_good:  # the first is not torch's: refused for what it is
            raise error
        modules = self.modules()
        if in_process_group() and _distributed(modules) and not all_failed(attempt):
            raise error
        if may_install(modules, (args, kwargs)):
            try:
                with capturing:
                    installed = install(lambda: self.function(*args, **kwargs), modules, (args, kwargs))
            except BackwardInside:
                raise error from error.__cause__
            if installed is not None:
                return installed
            error.add_note(
                "the first call of the step is not like the next one. Run it once before: "
                "`with torch.no_grad(): model(batch)`"
            )
        elif error.may_be_users:
            self.raise_users_error(args, kwargs)
        raise error

    def modules(self) -> list[torch.nn.Module]:
        """The modules of the step."""
        return [module for _, module in modules_of(self.function if self.module is None else self.module)]

    def trained(self) -> Iterator[torch.Tensor]:
        """What it trains, as far as that is known: of modules that it holds, and of its plans."""
        for module in self.modules():
            yield from module.parameters()
        for entry in list(self.entries.values()):
            for ref in (ref for part in entry.parts for ref in part.inputs.trained):
                if (tensor := ref()) is not None:
                    yield tensor

    @property
    def name(self) -> str:
        """What a user calls this step."""
        if self.module is not None:
            return type(self.module).__name__
        return getattr(self.function, "__qualname__", "the step")

    def raise_users_error(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run the step plainly, in case that raises an error of its own; the model stays as it is."""
        before = Trial(self.function if self.module is None else self.module, (), {}, None)
        try:
            with torch.no_grad(), torch.random.fork_rng():
                self.function(*args, **kwargs)
        finally:
            before.restore()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles of a capped model have None in its place, and load without Lowtide."""
        self.say("a copy of a capped model is not capped: lowtide.cap the copy, too, if it is to be trained")
        return type(None), ()

    def one_at_a_time(self, entry: Entry) -> AbstractContextManager[Any]:
        """Let only one thread capture at a time; planned steps need no lock."""
        return nullcontext() if entry.parts else capturing

    def trains(self) -> bool:
        if not torch.is_grad_enabled():
            return False
        if self.module is not None and not self.module.training:
            self.say("the model is in eval mode: it runs plainly, without a plan, until model.train()")
            return False
        if forced_eager():
            self.say('torch.compiler.set_stance("force_eager") is in force: the step runs plainly, uncapped')
            return False
        return True

    def entry(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        answers: Answers = (),
        *,
        options: Options | None = None,
    ) -> Entry:
        key = (*key_of(args, kwargs), self.caller.autocast, *answers)
        new = partial(self.new_entry, args, kwargs, answers)
        with self.lock:
            entry = self.find(key, new, options=options)
            if beside := bytes_of_calls(entry, self.say):
                key = (*key, beside)
                entry = self.find(key, new, beside=beside, options=options)
            if gradients_are_more(entry, self.say, stepped=lambda: stepped_since_call(self)):
                entry = self.find((*key, "accumulating"), new, beside=entry.beside, options=options)
            return entry

    def entry_of_a_larger(
        self, error: BudgetTooSmall, args: tuple[Any, ...], kwargs: dict[str, Any], answers: Answers
    ) -> Entry:
        """The entry of a batch whose share is too small, under what the share of a larger one came to.

        Parameters and optimizer state do not shrink with a batch: 60 % of the peak of the last, smaller one
        of an epoch may be less than they take. Raises the error where that is no help.
        """
        budget = self.options.budget
        if budget is None or not budget.is_share_of_peak or error.smallest > self.granted:
            raise error
        self.say(
            f"{budget} of the uncapped peak of a smaller batch cannot be kept: it gets the "
            f"{format_bytes(self.granted)} of a larger one"
        )
        options = replace(self.options, budget=replace(budget, at_least=self.granted))
        return self.entry(args, kwargs, answers, options=options)

    def find(
        self, key: Any, new: Callable[..., Entry], *, beside: int = 0, options: Options | None = None
    ) -> Entry:
        if key not in self.entries or (options is not None and not self.entries[key].has_more):
            entry = new(key, beside, options or self.options)
            if entry.shared is None:  # else it is not known yet whether the batch will be planned by it
                self.entries.make_room(key)
            self.entries[key] = entry
        elif state_is_more(self.entries[key], self.say):
            self.entries[key] = new(key, beside, self.entries[key].options)
        entry = self.entries.use(key)
        if entry.pieces is not None:
            entry.pieces.settle()
        return entry

    def new_entry(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        answers: Answers,
        key: Any,
        beside: int,
        options: Options,
    ) -> Entry:
        refuse_lazy(self.modules())
        shared = self.kin(args, kwargs).of(answers, self.captured_for) if self.may_share() else None
        entry = Entry(
            options, self.caller, self.caller.autocast, beside, self.may_branch(), key, shared=shared
        )
        if are_joined(options):
            entry.pieces = Pieces(entry, self.say)
        entry.call = self.captured_for(entry) if shared is None else shared.call
        return entry

    def kin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Kin:
        """The calls that are like this one but for their sizes."""
        called = self.function if self.module is None else self.module.forward
        return self.any_size.kin_of(args, kwargs, told_sizes(self.options.dynamic, called, args, kwargs))

    def captured_for(self, owner: Entry | Shared) -> Callable[..., Any]:
        """What torch's front end captures for an entry, or for many."""
        return captured(
            self.function,
            backend_for(owner) if isinstance(owner, Entry) else backend_of_kin(owner),
            fullgraph=not self.options.allow_breaks,
            recurrent=are_captured(self.modules()),
        )

    def may_share(self) -> bool:
        """Whether one capture may serve many shapes: not for pieces, nor on ranks that must capture alike."""
        if self.options.dynamic is False:
            return False
        if self.options.dynamic is not None and not self.may_branch():
            self.say(
                "dynamic= does nothing here: ranks whose steps have collectives capture each shape alike"
            )
        return self.may_branch()

    def may_branch(self) -> bool:
        """Whether branches on data may be taken as each batch says.

        Pieces of a step are run one by one, so none can be run again with another answer. Ranks whose steps
        have collectives in them must run the same graph, whatever their batches say; those of
        DistributedDataParallel have none.
        """
        if self.options.allow_breaks:
            return False
        return not in_process_group() or (
            private("active_ddp")() is not None and not _distributed(self.modules())
        )

    def forget_failed(self, entry: Entry) -> None:
        """An entry that never got a plan is not kept: the next call starts anew."""
        if not any(part.plan for part in entry.parts):
            self.forget(entry)

    def forget(self, entry: Entry) -> None:
        """Let the next call of that shape start anew."""
        with self.lock:
            for key in [key for key, other in self.entries.items() if other is entry]:
                del self.entries[key]

    def forget_plans(self) -> None:
        """Give back all plans, and what was captured for them."""
        self.entries.clear()
        self.any_size.kin.clear()

    def say_plans(self, parts: list[RunnableStep]) -> None:
        for part in parts:
            plan = part.plan
            if plan is None:
                continue
            if part.asked.piece is None:  # one of several is spoken of when all are planned
                say_plan(plan)
            for note in plan.notes:
                self.say(note, whatever_numbers=True)

    def let_go(self) -> None:
        """Called when the model is capped no more."""

    def say(self, message: str, *, whatever_numbers: bool = False) -> None:
        """Once per capped model; plans of other shapes may say the same with numbers of their own."""
        known = _without_numbers(message) if whatever_numbers else message
        if known not in self.said:
            self.said.add(known)
            log.warning(message)


def _without_numbers(message: str) -> str:
    """A message as it is whatever the numbers in it, and the units that these are rounded to."""
    return re.sub(r"[+-]?\d[\d.,]*(%| [KMGT]?i?B\b)?", "#", message)


def _is_planned(entry: Entry) -> bool:
    return bool(entry.parts)


def _distributed(modules: list[torch.nn.Module]) -> bool:
    """Whether a step has collectives, as far as its parameters show: DTensors are made of others."""
    return any(is_made_of_others(parameter) for module in modules for parameter in module.parameters())


def _ignore(_: Any) -> None:
    """A step of one graph is not told of its result."""


def _call(capped: Capped, *args: Any, **kwargs: Any) -> Any:
    return capped.call(*args, **kwargs)


_outside = outside_dynamo(_call, f"{CAPPED_INSIDE}; lowtide.uncap it first")
