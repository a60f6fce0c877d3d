"""A capped model that `fully_shard` was called on: one budget over its units, on each device.

FSDP gathers and frees the parameters of a unit in hooks around its forward, which no capture can hold. So
the unit's own forward, inside of the hooks, is captured and planned. Before the first step of a shape the
whole step is rehearsed on fake tensors, which tells what is there at each unit's turn; the budget is split
over the units then, and the first step already runs under it.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .._torch import outside_dynamo, private
from ..capture.conditions import OtherData
from ..capture.torch_errors import CAPPED_INSIDE
from ..console.log import log, planning, say_once
from ..devices.allocator import rounded
from ..devices.baseline import states
from ..devices.memory import memory_of
from ..errors import BudgetTooSmall, CaptureError, LowtideError
from ..options import Options
from ..pipeline.compiled_calls import key_of
from ..pipeline.in_flight import BAND, held_beside, too_many
from ..pipeline.optimizer_steps import seen_for
from ..planner.arenas import allocated_alone
from ..planner.budgets import resolve
from ..planner.unit_plans import unit_plans
from ..planner.unit_split import knee_peak
from ..plans.graph import Graph
from ..plans.planned_step import Plan
from ..sharded.budget_split import Split, Splitter
from ..sharded.fsdp_groups import Sharded, Unit
from ..sharded.rehearsal import Rehearsal, rehearse
from ..sharded.unit_steps import SharedRunners, UnitSteps, captured_graph
from ..units import Budget, format_bytes
from .capped import Capped
from .kept_plans import KeptPlans
from .whole_steps import refuse_what_is_not_captured

__all__ = ["CappedUnits"]


class CappedUnits(Capped):
    """Calls a sharded model under a budget."""

    def __init__(self, function: Callable[..., Any], options: Options, *, module: torch.nn.Module) -> None:
        _refuse_options(options)
        super().__init__(function, options, module=module)
        self.sharded = Sharded(module)
        if not any(unit.whole for unit in self.sharded.units):
            raise LowtideError(
                "fully_shard was called on the whole model alone: its parameters are all there at once. Call "
                "it on the blocks first, as in `for block in model.layers: fully_shard(block)`, then on the "
                "model, and cap it then"
            )
        shared = SharedRunners()
        self.steps = {
            id(unit): UnitSteps(unit, options, self.caller, shared)
            for unit in self.sharded.units
            if unit.whole
        }
        self.kinds: dict[Any, tuple[Plan, ...] | None] = {}
        self.rehearsals: KeptPlans[Rehearsal] = KeptPlans(options.max_plans, self.say)
        self.splits: dict[Any, Split] = {}
        self.turns: _Turns | None = None
        self.outside = 0
        self.install_forwards()

    def install_forwards(self) -> None:
        """Put a planned forward in the place of each unit's own, inside of FSDP's hooks."""
        for unit in self.sharded.units:
            if unit.whole:
                unit.module.forward = self.forward_of(unit)

    def let_go(self) -> None:
        """Let the units be as they were."""
        for unit in self.sharded.units:
            own = vars(unit.module).get("forward")
            if getattr(own, "__lowtide_unit__", None) is unit:
                del unit.module.forward
                if getattr(unit.module, "forward", None) != unit.forward:
                    unit.module.forward = unit.forward

    def forward_of(self, unit: Unit) -> Callable[..., Any]:
        @functools.wraps(unit.forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return _outside(self, unit, args, kwargs)

        forward.__lowtide_unit__ = unit  # type: ignore[attr-defined]
        return forward

    def call(self, *args: Any, **kwargs: Any) -> Any:
        if not self.trains():
            return self.function(*args, **kwargs)
        refuse_what_is_not_captured()
        split = self.split_for(args, kwargs)
        self.turns = _Turns(split)
        captured = self.captured
        try:
            result = self.function(*args, **kwargs)
        finally:
            self.turns = None
        if self.captured > captured:
            gc.collect()  # a capture leaves cycles that hold frames of the model, and so its tensors
        self.calls += 1
        self.plan = split.plan
        self.outside += split.outside
        return result

    @property
    def captured(self) -> int:
        """How many forwards of units are captured."""
        return sum(len(steps.entries) for steps in self.steps.values())

    def call_unit(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The forward of a unit: by its plan where the capped model is called and trains."""
        if self.turns is None or not torch.is_grad_enabled():
            if torch.is_grad_enabled() and unit.module.training:
                self.say(f"{unit.name} was called by itself, not by the capped model: it ran plainly")
            return unit.forward(*args, **kwargs)
        key = key_of(args, kwargs)
        plan = self.turns.take(unit, key)
        if plan is None:
            if unit in self.turns.units:
                self.say(
                    f"{unit.name} was called more often than in the rehearsal of this step: that call ran "
                    "plainly, and the budget does not cover it"
                )
            return unit.forward(*args, **kwargs)
        return self.steps[id(unit)].run(key, plan, args, kwargs)

    # The split

    def split_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Split:
        """The plans of the units for a call, under the budget beside what is there now."""
        key = self.key_of_rehearsal(args, kwargs)
        if key in self.rehearsals:
            self.rehearsals.use(key)
        else:
            self.rehearsals.make_room(key)
            self.splits = {kept: split for kept, split in self.splits.items() if kept in self.rehearsals}
        if not held_beside(self.caller):
            self.outside = 0
        bands = self.bands(args, kwargs)
        known = self.splits.get(key)
        if known is not None and self.still_fits(known, sum(bands.values())):
            return known
        with planning():
            if key not in self.rehearsals:
                self.rehearsals[key] = self.rehearsed(args, kwargs)
            split = self.splits[key] = self.made(self.rehearsals[key], bands)
        self.say_split(split)
        return split

    def key_of_rehearsal(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Where the rehearsal of such a batch is kept: by shapes, and by what its data say to branches."""
        key: tuple[Any, ...] = (key_of(args, kwargs), self.caller.autocast, *self.sharded.groups())
        while key in self.rehearsals:
            try:
                self.rehearsals[key].must_hold_for((args, kwargs))
            except OtherData as other:
                key = (*key, other.answers)
            else:
                break
        return key

    def still_fits(self, known: Split, base: int) -> bool:
        limit = known.plan.budget
        return base <= known.base or (limit is not None and known.peak + base - known.base <= limit)

    def rehearsed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Rehearsal:
        """The step on fake tensors; once more where units were captured in it.

        What a capture leaves to the garbage collector has frames of the model's own code, and so keeps
        tensors alive that would be counted.
        """
        known = len(self.kinds)
        outside = self.options.outside
        found = rehearse(self.sharded, args, kwargs, plan=self.plans_of, key=key_of, outside=outside)
        if len(self.kinds) > known:
            found = rehearse(self.sharded, args, kwargs, plan=self.plans_of, key=key_of, outside=outside)
        return found

    def plans_of(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Plan, ...] | None:
        """The plans of a unit; units that are alike are captured once here."""
        key = (_kind(unit.module), key_of(args, kwargs))
        if key not in self.kinds:
            graph = captured_graph(unit, args, kwargs, self.options)
            with private("without_modes")():
                self.kinds[key] = None if graph is None else unit_plans(graph, memory_of(graph, None).blocks)
        return self.kinds[key]

    def made(self, rehearsal: Rehearsal, bands: dict[str, int]) -> Split:
        splitter = Splitter(rehearsal, bands)
        if not rehearsal.calls:
            raise CaptureError("no unit of fully_shard was called in this step: there is nothing to plan")
        budget = self.options.budget
        assert budget is not None
        if budget.is_knee:
            budget = Budget(budget.text, bytes=knee_peak(splitter.moments, splitter.end))
        size = resolve(budget, splitter.uncapped(), memory_of(_graph_of(rehearsal), None))
        try:
            return splitter.under(budget, size)
        except BudgetTooSmall:
            if BAND in bands:
                raise too_many(self.caller, size) from None
            raise

    def bands(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, int]:
        """What is there during the whole step, besides what FSDP adds and the model takes."""
        device, sharded = self.sharded.device, self.sharded
        others = [one for _, one in seen_for(map(weakref.ref, self.trained()), device)]
        counted = states(self.options.optimizer, others, device)
        found = {
            "sharded parameters": sum(group.sharded for group in sharded.groups()),
            "buffers": self.resident(),
            "optimizer": sum(state.held + state.coming for state in counted),
            "present gradients": sharded.part_gradients() + sharded.whole_gradients(),
            BAND: self.in_flight(),
        }
        if device.type == "cuda":
            batch = sum(
                t.nbytes for t in private("tree_leaves")((args, kwargs)) if isinstance(t, torch.Tensor)
            )
            coming = sum(state.coming for state in counted)
            there = torch.cuda.memory_allocated(device) - batch - sum(found.values()) + coming
            found["other"] = max(there, 0)
        return {name: size for name, size in found.items() if size}

    def in_flight(self) -> int:
        """The bytes of calls whose backward is still to come, and of what the root saved for them."""
        if held_beside(self.caller):
            gc.collect()  # a call that only a cycle of objects holds may be gone
        held = held_beside(self.caller)
        return held + self.outside if held else 0

    def resident(self) -> int:
        """The bytes of buffers, and of parameters that are not sharded."""
        device = self.sharded.device
        tensors = [*self.sharded.root.buffers(), *self.sharded.other_parameters()]
        return sum(
            rounded(t.nbytes, device) for t in tensors if _is_plain(t) and t.device.type == device.type
        )

    def trained(self) -> Iterator[torch.Tensor]:
        """What it trains: this rank's parts, whatever stands in the modules at the moment."""
        yield from (parameter.sharded_param for _, _, parameter in self.sharded.parameters())
        yield from self.sharded.other_parameters()

    def say_split(self, split: Split) -> None:
        units = len(self.steps)
        log.info(
            "planned over %d units of fully_shard: peak %s of %s uncapped on this device, budget %s, "
            "%+.1f%% time",
            units,
            format_bytes(split.peak),
            format_bytes(split.uncapped),
            split.plan.budget_in_words,
            100 * split.extra,
        )
        device = memory_of(split.plan.graph, None)
        for note in allocated_alone(device, "units of fully_shard are not replayed"):
            say_once(note)


def _call_unit(capped: CappedUnits, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return capped.call_unit(unit, args, kwargs)


_outside = outside_dynamo(_call_unit, f"{CAPPED_INSIDE}; lowtide.uncap it first")


class _Turns:
    """The calls of one step in their order, each taken once."""

    def __init__(self, split: Split) -> None:
        self.left = list(zip(split.calls, split.plans, strict=True))
        self.units = {call.unit for call in split.calls}

    def take(self, unit: Unit, key: Any) -> Plan | None:
        """The plan of a call; one that was not rehearsed has no place in the budget."""
        for place, (call, plan) in enumerate(self.left):
            if call.unit is unit and call.key == key:
                del self.left[place]
                return plan
        if not any(call.unit is unit for call, _ in self.left):
            return None
        raise CaptureError(
            f"{unit.name} is called with other shapes than when the step was rehearsed: the code between the "
            "units does something else on fake tensors. A model that is sharded and capped must do the same "
            "with every batch of one shape"
        )


def _refuse_options(options: Options) -> None:
    if options.executor != "eager":
        raise LowtideError(
            f'executor={options.executor!r} does not run the units of fully_shard; use the executor "eager"'
        )
    if options.plan is not None:
        raise LowtideError("a model that is sharded by fully_shard has many plans: give a budget, not plan=")


def _kind(module: torch.nn.Module) -> tuple[Any, ...]:
    """What tells units apart that are not alike: classes, sizes, and plain attributes."""
    return tuple(
        (
            name,
            type(part),
            tuple(sorted((key, value) for key, value in vars(part).items() if isinstance(value, _PLAIN))),
            tuple((key, tuple(p.shape), p.requires_grad) for key, p in part.named_parameters(recurse=False)),
        )
        for name, part in module.named_modules()
    )


_PLAIN = (bool, int, float, str)


def _graph_of(rehearsal: Rehearsal) -> Graph:
    plans: tuple[Plan, ...] = rehearsal.calls[0].planned
    return plans[0].graph


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.is_meta
