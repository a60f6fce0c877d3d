"""A capped callable: one plan per shape of its arguments, made at the first training call.

Every plan has a code object of its own, so that torch's compile caches never mix plans, two capped models
never meet, and an old plan can be let go. Calls in eval mode or without gradients run plainly.
"""

from __future__ import annotations

import gc
import threading
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from .._torch import capture_settings, count_global_hooks, outside_dynamo, private, usual_stance
from ..capture.joint_graph import capturing
from ..capture.torch_errors import CAPPED_INSIDE, clear_errors
from ..console.log import log, planning, say_plan
from ..errors import BudgetTooSmall, CaptureError
from ..measuring.trial import Trial, modules_of
from ..options import Options, limit
from ..pipeline.in_flight import BAND, Caller, held_beside, some_plan, too_many
from ..pipeline.optimizer_steps import changes
from ..pipeline.runnable_step import RunnableStep, runnable
from ..plans.planned_step import Plan
from ..plans.simulator import simulate
from ..sketching.marker import leaving_marks
from ..stages import Asked
from ..torch_state.autocast_state import State, present_state
from ..torch_state.dispatch_modes import with_foreign_modes, without_foreign_modes
from ..units import format_bytes
from .first_call import install, may_install
from .whole_steps import (
    forced_eager,
    refuse_lazy,
    refuse_part,
    refuse_second_part,
    refuse_what_is_not_captured,
)

__all__ = ["Capped", "fresh"]

_present = threading.local()
"""How many graphs torch handed over for the capped call that a thread is in; None outside of one."""


def _present_graphs() -> int | None:
    return getattr(_present, "graphs", None)


@dataclass(eq=False)
class Entry:
    """The compiled step of one shape, and the plans of its parts.

    It is traced for a backward in the state `autocast`, and planned beside other calls that hold `beside`
    bytes.
    """

    options: Options
    caller: Caller
    autocast: State = ()
    beside: int = 0
    call: Callable[..., Any] | None = None
    parts: list[RunnableStep] = field(default_factory=list)
    ran: list[RunnableStep] = field(default_factory=list)
    with_bands: dict[Any, tuple[Plan, Plan]] = field(default_factory=dict)
    looked: int = -1
    state: int = 0

    @property
    def plan(self) -> Plan | None:
        """The plan of the last step, or of its largest part; the sketched layers are those of all parts."""
        plans = [part.plan for part in self.ran if part.plan is not None]
        if len(plans) < 2:
            return plans[0] if plans else None
        sketched, trimmed = (
            tuple(dict.fromkeys(name for plan in plans for name in getattr(plan, field)))
            for field in ("sketched", "trimmed")
        )
        return replace(max(plans, key=lambda plan: plan.peak), sketched=sketched, trimmed=trimmed)

    def plan_with(self, bands: dict[str, int]) -> Plan | None:
        """The plan as it stands beside bytes that it was made without."""
        plan = self.plan
        key = tuple(bands.items())
        if plan is None or not key:
            return plan
        before, known = self.with_bands.get(key, (None, None))
        if before is plan:  # a step may have been planned again since
            return known
        made = _with_more(plan, bands)
        self.with_bands[key] = plan, made
        return made

    def uncounted(self) -> dict[str, int]:
        """Bytes that are there now and that the plan does not count."""
        calls = 0 if self.beside else held_beside(self.caller)
        found = {"present gradients": self.gradients(), "optimizer": self.uncounted_state(), BAND: calls}
        return {name: size for name, size in found.items() if size}

    def fits(self, more: int) -> bool:
        """Whether the plan has room for more bytes beside it; where there is none yet, it has not."""
        plan = self.plan
        return plan is not None and (
            plan.budget is None or plan.peak + self.uncounted_state() + more <= plan.budget
        )

    def uncounted_state(self) -> int:
        """Bytes of optimizer state that are there now and that the plan does not count."""
        if self.looked != changes():
            self.looked = changes()
            self.state = max((part.uncounted_state() for part in self.parts), default=0)
        return self.state

    def gradients(self) -> int:
        """Bytes of gradients that are there now and that the plan does not count."""
        uncounted = (part.inputs for part in self.ran if not part.inputs.accumulating)
        return sum(size for inputs in uncounted for size in inputs.present_gradients())


def _with_more(plan: Plan, bands: dict[str, int]) -> Plan:
    """The plan with more bytes beside it."""
    fixed = plan.graph.fixed
    graph = plan.graph.replace(
        fixed={**fixed, **{name: fixed.get(name, 0) + size for name, size in bands.items()}}
    )
    compiled = None if plan.compiled is None else plan.compiled + sum(bands.values())
    return replace(plan, graph=graph, timeline=simulate(graph, plan.schedule), compiled=compiled)


class Capped:
    """Calls a function under a budget. `plan` is the one of the last training call."""

    def __init__(
        self, function: Callable[..., Any], options: Options, *, module: torch.nn.Module | None = None
    ) -> None:
        self.function = function
        self.options = options
        self.module = module
        self.plan: Plan | None = None
        self.entries: OrderedDict[Any, Entry] = OrderedDict()
        self.lock = threading.RLock()
        self.said: set[str] = set()
        self.caller = Caller(self.name)
        self.calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The call, planned where it trains; torch.compile around it breaks its graph here."""
        return _outside(self, *args, **kwargs)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        if not self.trains():
            return self.function(*args, **kwargs)
        if _present_graphs() is not None:
            raise CaptureError(f"{CAPPED_INSIDE}: a step has one budget. lowtide.uncap one of the two")
        refuse_what_is_not_captured()
        entry = self.entry(args, kwargs)
        try:
            return self.run(entry, args, kwargs)
        except CaptureError as error:
            if any(part.plan for part in entry.parts):
                raise
            installed = self.install(error, args, kwargs)
        result = self.run(self.entry(args, kwargs), args, kwargs)
        self.say(f"captured at the second try: the first call of {self.name} {installed}")
        return result

    def run(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One call of a compiled step, which plans it where it is new."""
        before = len(entry.parts)
        uncounted = entry.uncounted()
        entry.ran = []
        _present.graphs = 0
        try:
            with (
                self.one_at_a_time(entry),
                nullcontext() if entry.parts else planning(),
                clear_errors(),
                without_foreign_modes(),
                usual_stance(),
                capture_settings(),
                leaving_marks(),
            ):
                result = entry.call(*args, **kwargs)  # type: ignore[misc]
        except BaseException as error:
            self.forget_failed(entry)
            if isinstance(error, BudgetTooSmall) and entry.beside:
                raise too_many(self.caller, error.budget) from None
            raise
        finally:
            _present.graphs = None
        self.calls += 1
        self.plan = entry.plan_with(uncounted) or self.plan
        if entry.plan is None:
            self.say("torch captured nothing of this step to plan: it ran plainly, without a cap")
        if len(entry.parts) > before:
            self.say_plans(entry.parts[before:])
        return result

    def install(self, error: CaptureError, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Run a step that torch could not capture plainly, for what its first call installs, in words.

        Raises what the step itself raises, or the error where a second try would not help.
        """
        if error.__cause__ is None or error.for_good:  # the first is not torch's: refused for what it is
            raise error
        modules = self.modules()
        if may_install(modules, (args, kwargs)):
            with capturing:
                installed = install(lambda: self.function(*args, **kwargs), modules, (args, kwargs))
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

    def entry(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Entry:
        key = (*_key(args, kwargs), self.caller.autocast)
        with self.lock:
            entry = self.find(key)
            if beside := self.must_leave_room(entry):
                key = (*key, beside)
                entry = self.find(key, beside=beside)
            if self.must_count_gradients(entry):
                entry = self.find((*key, "accumulating"), beside=entry.beside)
            return entry

    def find(self, key: Any, *, beside: int = 0) -> Entry:
        if key not in self.entries:
            if len(self.entries) >= self.options.max_plans:
                self.entries.popitem(last=False)
                self.say(
                    f"more than {self.options.max_plans} shapes were seen: old plans are let go and made "
                    "again when they come back; pad the batches to fewer shapes, or raise max_plans="
                )
            self.entries[key] = self.new_entry(beside)
        elif self.must_count_state(self.entries[key]):
            self.entries[key] = self.new_entry(beside)
        self.entries.move_to_end(key)
        return self.entries[key]

    def must_leave_room(self, entry: Entry) -> int:
        """The bytes of calls in flight, where they do not fit beside the plan."""
        beside = held_beside(self.caller)
        if not beside or entry.fits(beside):
            return 0
        if limit(self.options, entry.plan or some_plan()) is None:
            self.say(f"{self.relative_to()}: what calls hold whose backward is still to come is not in it")
            return 0
        if self.caller.beside != beside:
            gc.collect()  # a call that only a cycle of objects holds, such as a traceback's, may be gone
            self.caller.beside = held_beside(self.caller)
        return self.caller.beside

    def relative_to(self) -> str:
        return f"the budget {self.options.budget} is of the uncapped peak of one call, as it was planned"

    def must_count_state(self, entry: Entry) -> bool:
        """Whether optimizer state that is there now does not fit beside the plan that was made without it."""
        if entry.plan is None or entry.fits(0):
            return False
        if limit(self.options, entry.plan) is None:
            self.say(
                f"{self.relative_to()}: the {format_bytes(entry.state)} of optimizer state that were made "
                "since then are not in it. lowtide.cap(..., optimizer=optimizer) counts them"
            )
            return False
        self.say(
            f"{format_bytes(entry.state)} of optimizer state were made after this step was planned, and do "
            "not fit beside it: it is planned again. lowtide.cap(..., optimizer=optimizer) plans for them "
            "from the first step on"
        )
        return True

    def must_count_gradients(self, entry: Entry) -> bool:
        """Whether gradients that are there now do not fit beside the plan that was made without them."""
        present = entry.gradients()
        return present > 0 and entry.plan is not None and not entry.fits(present)

    def new_entry(self, beside: int) -> Entry:
        refuse_lazy(self.modules())
        entry = Entry(self.options, self.caller, self.caller.autocast, beside)
        entry.call = torch.compile(
            fresh(self.function),
            backend=_backend_for(entry),
            fullgraph=not self.options.allow_breaks,
            dynamic=False,
        )
        return entry

    def forget_failed(self, entry: Entry) -> None:
        """An entry that never got a plan is not kept: the next call starts anew."""
        with self.lock:
            if not any(part.plan for part in entry.parts):
                self.entries = OrderedDict((k, e) for k, e in self.entries.items() if e is not entry)

    def say_plans(self, parts: list[RunnableStep]) -> None:
        for plan in (part.plan for part in parts if part.plan is not None):
            say_plan(plan)
            for note in plan.notes:
                self.say(note)

    def say(self, message: str) -> None:
        """Once per capped model."""
        if message not in self.said:
            self.said.add(message)
            log.warning(message)


_outside = outside_dynamo(Capped.call, f"{CAPPED_INSIDE}; lowtide.uncap it first")


def _backend_for(entry: Entry) -> Callable[..., Any]:
    """The backend of one entry; torch keeps backends for good, so this one holds nothing alive."""
    weak = weakref.ref(entry)

    def backend(module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        owner = weak()
        assert owner is not None
        if not owner.options.allow_breaks:
            refuse_part(module)
            if _present.graphs:
                refuse_second_part()
        asked = Asked(owner.options, autocast=owner.autocast, beside=owner.beside)
        part = runnable(asked, owner.caller, module, inputs)
        _present.graphs += 1
        owner.parts.append(part)

        def call(*args: Any) -> Any:
            now = weak()
            if now is not None:
                now.ran.append(part)
            return part(*args)

        return with_foreign_modes(call)

    return backend


def fresh(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same call behind a code object of its own."""

    def step(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return types.FunctionType(
        step.__code__.replace(), step.__globals__, step.__name__, step.__defaults__, step.__closure__
    )


def _key(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """What a plan depends on besides the model: shapes, dtypes, devices, plain values, autocast and DDP."""
    leaves, spec = private("tree_flatten")((args, kwargs))
    in_ddp = private("active_ddp")() is not None
    return (present_state(), count_global_hooks(), in_ddp, str(spec), *map(_leaf_key, leaves))


def _leaf_key(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return (leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad)
    return leaf if isinstance(leaf, int | float | str | bool | None) else type(leaf)
