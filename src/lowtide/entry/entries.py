"""The compiled steps of a capped callable: one entry per shape of its arguments, with the plans of its parts.

Every entry has a code object of its own, so that torch's compile caches never mix plans, two capped models
never meet, and an old plan can be let go.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from .._torch import private
from ..capture.fixed_sizes import Fixed
from ..capture.joint_graph import capturing
from ..errors import LowtideError
from ..options import Options
from ..pipeline.compiled_calls import key_of
from ..pipeline.in_flight import BAND, Caller, held_beside
from ..pipeline.optimizer_steps import changes
from ..pipeline.runnable_step import RunnableStep, runnable
from ..plans.planned_step import Plan
from ..plans.simulator import simulate
from ..process_wide import here
from ..stages import Asked
from ..torch_state.autocast_state import State
from ..torch_state.dispatch_modes import with_foreign_modes
from .any_size import OneSizeOnly, OpenStep, Shared
from .broken_steps import Pieces
from .whole_steps import refuse_part, refuse_second_part

__all__ = ["Entry", "backend_for", "backend_of_kin", "graphs_of_this_call", "key_of", "present_graphs"]


class _Present(threading.local):
    graphs: int | None = None
    entry: Entry | None = None


_present = _Present()


def present_graphs() -> int | None:
    """How many graphs torch handed over for the capped call that this thread is in; None outside of one."""
    return _present.graphs


def graphs_of_this_call(entry: Entry | None = None) -> here:
    """Count the graphs that torch hands over for one capped call, which an entry is called for."""
    return here(_present, graphs=0, entry=entry)


@dataclass(eq=False)
class Entry:
    """The compiled step of one shape, and the plans of its parts.

    It is traced for a backward in the state `autocast`, and planned beside other calls that hold `beside`
    bytes; `branches` on the batch's data are taken as the batch says. `attempt` is what all ranks call its
    planning; `key` is what it is found by; `captures` are the calls that torch captured. `shared` is what was
    captured for other shapes as well, and `fixed` what was made of that.
    """

    options: Options
    caller: Caller
    autocast: State = ()
    beside: int = 0
    branches: bool = True
    key: Any = None
    attempt: str = ""
    captures: int = 0
    call: Callable[..., Any] | None = None
    shared: Shared | None = None
    fixed: dict[Any, tuple[Fixed, RunnableStep]] = field(default_factory=dict)
    parts: list[RunnableStep] = field(default_factory=list)
    ran: list[RunnableStep] = field(default_factory=list)
    with_bands: dict[Any, tuple[Plan, Plan]] = field(default_factory=dict)
    looked: int = -1
    state: int = 0
    pieces: Pieces | None = None

    @property
    def plan(self) -> Plan | None:
        """The plan of the last step, or of its largest part; the sketched layers are those of all parts."""
        if self.pieces is not None and self.pieces.plan is not None:
            return self.pieces.plan
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
        if self.pieces is not None and self.pieces.unsettled and plan is not None:
            return True  # they will be planned with what is there then
        return plan is not None and (
            plan.budget is None or plan.peak + self.uncounted_state() + more <= plan.budget
        )

    @property
    def has_more(self) -> bool:
        """Whether it is planned under what the share of a larger batch came to."""
        budget = self.options.budget
        return budget is not None and budget.at_least > 0

    def uncounted_state(self) -> int:
        """Bytes of optimizer state that are there now and that the plan does not count."""
        if self.looked != changes():
            self.looked = changes()
            self.state = max((part.uncounted_state() for part in self.parts), default=0)
            if self.pieces is not None and self.pieces.plan is not None:
                self.state = self.pieces.uncounted_state()
        return self.state

    def gradients(self) -> int:
        """Bytes of gradients that are there now and that the plan does not count."""
        uncounted = {id(part.inputs): part.inputs for part in self.ran if not part.inputs.accumulating}
        return sum(size for inputs in uncounted.values() for size in inputs.present_gradients())


def _with_more(plan: Plan, bands: dict[str, int]) -> Plan:
    """The plan with more bytes beside it."""
    fixed = plan.graph.fixed
    graph = plan.graph.replace(
        fixed={**fixed, **{name: fixed.get(name, 0) + size for name, size in bands.items()}}
    )
    compiled = None if plan.compiled is None else plan.compiled + sum(bands.values())
    return replace(
        plan, graph=graph, timeline=simulate(graph, plan.schedule), compiled=compiled, reserved=None
    )


def backend_for(entry: Entry) -> Callable[..., Any]:
    """The backend of one entry; torch keeps backends for good, so this one holds nothing alive."""
    weak = weakref.ref(entry)

    def backend(module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        owner = weak()
        assert owner is not None
        if not owner.options.allow_breaks:
            _refuse_parts(module)
        asked = _asked(owner)
        if owner.pieces is not None:
            asked = replace(asked, piece=owner.pieces.piece(module))
        part = runnable(asked, owner.caller, module, inputs)
        _present.graphs = (_present.graphs or 0) + 1
        owner.parts.append(part)
        # torch keeps what a backend returns for good, and a part refers to the optimizer and its parameters
        held = weakref.ref(part)

        def call(*args: Any) -> Any:
            now, step = weak(), held()
            assert now is not None, "what is called is alive"
            assert step is not None
            if now.pieces is not None:
                step, results = now.pieces.run(step, args)
                now.ran.append(step)
                return results
            now.ran.append(step)
            return step(*args)

        return with_foreign_modes(call)

    return backend


def backend_of_kin(shared: Shared) -> Callable[..., Any]:
    """The backend of what is captured for many entries: each call goes to a step of the present one."""
    weak = weakref.ref(shared)

    def backend(module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        owner, present = weak(), _present.entry
        assert owner is not None
        assert present is not None
        _refuse_parts(module)
        held = weakref.ref(owner.add(module, marked=not present.parts))
        _present.graphs = (_present.graphs or 0) + 1

        def call(*args: Any) -> Any:
            step, entry = held(), _present.entry
            assert step is not None, "what is called is alive"
            assert entry is not None
            return _call_for_sizes(step, entry, args)

        return with_foreign_modes(call)

    return backend


def _refuse_parts(module: torch.fx.GraphModule) -> None:
    refuse_part(module)
    if _present.graphs:
        refuse_second_part()


def _asked(entry: Entry) -> Asked:
    return Asked(
        entry.options,
        autocast=entry.autocast,
        beside=entry.beside,
        attempt=entry.attempt,
        search=entry.caller.search,
    )


def _call_for_sizes(step: OpenStep, entry: Entry, args: tuple[Any, ...]) -> Any:
    """One call of a graph that stands for many sizes, by the plan for these."""
    if step.conditions is not None:
        step.conditions.must_hold(args)
    key = (id(step), *(args[place] for place in step.graph.symbols))
    if key not in entry.fixed:
        with capturing:
            entry.fixed[key] = _made_for_sizes(step, entry, args)
    fixed, part = entry.fixed[key]
    entry.ran.append(part)
    return fixed.results(part(*(args[place] for place in fixed.places)))


def _made_for_sizes(step: OpenStep, entry: Entry, args: tuple[Any, ...]) -> tuple[Fixed, RunnableStep]:
    """The step for the sizes of a call; where none can be made, the shape is captured by itself."""
    fixed = step.fixed(args)
    inputs = [args[place] for place in fixed.places]
    try:
        with private("without_modes")():
            part = runnable(_asked(entry), entry.caller, fixed.module, inputs, asked_of=step.asked_of(fixed))
    except (LowtideError, MemoryError):
        raise
    except Exception as error:
        raise OneSizeOnly(f"{type(error).__name__}: {error}") from error
    entry.parts.append(part)
    return fixed, part
