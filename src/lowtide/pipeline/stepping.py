"""Optimizers that step inside of the backward: what is looked at around the calls, and refused.

The training loop stays as it is: backward, `optimizer.step()`, `optimizer.zero_grad()`. What is updated in
the backward has no gradient afterwards, so that the loop's own step leaves it alone. That is right only
where the gradient was the whole one, and was used once. So these are refused:

- a second backward before the optimizer has stepped (gradient accumulation), or one that finds gradients;
- a second call before the backward of the first: it would read parameters that the first one's changes;
- a backward for some inputs only (`torch.autograd.grad`, `backward(inputs=...)`);
- a loss that is multiplied afterwards, as GradScaler does: the first backwards are looked at, on the CPU all;
- a parameter that gets another gradient, from outside of the captured step: seen when the optimizer steps.

Clipping by the norm of all gradients cannot be seen: it finds none (docs/step-in-backward.md).
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .._torch import in_process_group, private
from ..capture.awaited import has_hooks
from ..devices.optimizers import each_optimizer
from ..devices.per_tensor import innermost, looked_at
from ..errors import LowtideError, UnsupportedBackward
from ..options import Options
from ..run.updates import Updates
from .in_flight import Caller, waits_for_backward
from .optimizer_steps import seen

__all__ = ["Stepping", "refuse_ranks", "refuse_without_updates", "stepping_optimizers"]

_LOOKS = 3
"""Backwards in which the gradient of a loss on a GPU is looked at: that waits for the device; chosen."""

_WITHOUT = "or lowtide.cap the model without step_in_backward"


def stepping_optimizers(options: Options) -> list[Any]:
    """The optimizers that step inside of the backward."""
    return [innermost(one) for one in each_optimizer(options.optimizer)] if options.step_in_backward else []


def refuse_ranks(*, sharded: bool = False) -> None:
    """Refuse ranks that exchange gradients: each would update by its own before they have met."""
    several = in_process_group() and torch.distributed.get_world_size() > 1
    if sharded or several or private("active_ddp")() is not None:
        raise LowtideError(
            "step_in_backward=True cannot be used with several ranks (DistributedDataParallel, fully_shard, "
            "ZeroRedundancyOptimizer): each would be updated by its own gradients before these are "
            "averaged. Train on one device, " + _WITHOUT
        )


def refuse_without_updates(present: int) -> NoReturn:
    """Refuse a step in whose backward nothing can be updated; `present` counts gradients that are there."""
    if present:
        raise LowtideError(
            f"step_in_backward=True has nothing to update: {present} parameters have a gradient already, "
            "which the new one is added to. optimizer.zero_grad() before the first call"
        )
    raise LowtideError(
        "step_in_backward=True has nothing to update: none of the optimizer's parameters gets a gradient in "
        "this step that is its alone. Is the optimizer that of this model, and are there hooks on its "
        "parameters, or parameters that share their memory? Otherwise cap it without step_in_backward"
    )


@dataclass(eq=False)
class Stepping:
    """The updates inside of the backwards of one captured step."""

    caller: Caller
    optimizers: Sequence[Any]
    names: Sequence[str]
    looks: int = field(default=_LOOKS)

    def __post_init__(self) -> None:
        _look_at_steps(self.caller)

    def before_call(self) -> None:
        """Refuse a call beside one whose backward is still to come."""
        if waits_for_backward(self.caller):
            gc.collect()  # a call that only a cycle of objects holds may be gone
            if waits_for_backward(self.caller):
                raise UnsupportedBackward(
                    f"{self.caller.name} is called while the backward of an earlier training call is still "
                    "to come, and with step_in_backward=True that backward changes the parameters which "
                    "this call reads. Call backward after each forward, put the calls into one function "
                    f"that returns the sum of their losses and cap that, {_WITHOUT}"
                )

    def after_call(self, node: Any, args: Sequence[Any], places: Sequence[int]) -> None:
        """Let the backward of a call update the inputs at some places."""
        updates = Updates({place: args[place] for place in places}, self.optimizers)
        own = set(map(id, updates.parameters.values()))
        ends = [end for end, _ in node.next_functions if id(getattr(end, "variable", None)) in own]

        def before_backward(tangents: Any) -> None:
            self.refuse_parts(ends)
            self.refuse_accumulation(updates.parameters)
            self.refuse_scaled(tangents)
            updates.begin()
            self.refuse_changes(updates)
            self.note(updates)
            ends.clear()

        node.register_prehook(before_backward)

    def refuse_parts(self, ends: Sequence[Any]) -> None:
        if not all(map(_will_run, ends)):
            raise UnsupportedBackward(
                "step_in_backward=True updates all parameters in a backward, and this one is for some inputs "
                "only (torch.autograd.grad, or backward(inputs=...)). Call loss.backward(), " + _WITHOUT
            )

    def refuse_accumulation(self, parameters: Mapping[int, torch.Tensor]) -> None:
        """Refuse gradients of an earlier backward, and a backward before the optimizer has stepped."""
        for place, parameter in parameters.items():
            if parameter.grad is not None:
                raise UnsupportedBackward(
                    f"{self.names[place]} has a gradient already, and with step_in_backward=True it would be "
                    "updated without that. optimizer.zero_grad() before the backward; to accumulate "
                    f"gradients over batches take larger batches under the budget, {_WITHOUT}"
                )
        for optimizer in self.optimizers:
            if self.caller.steps.get(id(optimizer)) == seen(optimizer).steps:
                raise UnsupportedBackward(
                    f"a second backward has begun, and {type(optimizer).__name__}.step() was not called "
                    "since the first: with step_in_backward=True each backward updates the parameters, so "
                    "gradients cannot be accumulated. Call optimizer.step() after each backward as ever (it "
                    f"finds nothing to do); take larger batches under the budget instead, {_WITHOUT}"
                )

    def refuse_changes(self, updates: Updates) -> None:
        """Refuse what has come since the step was planned, and would get no gradient any more."""
        for optimizer in self.optimizers:
            if (reason := looked_at(optimizer)) is not None:
                raise UnsupportedBackward(f"{type(optimizer).__name__}: {reason}. Take it away, {_WITHOUT}")
        for place, parameter in updates.parameters.items():
            hooked, owned = has_hooks(parameter), id(parameter) in updates.owners
            if hooked or not owned:
                how = "has got a hook" if hooked else "is no longer among the optimizer's parameters"
                raise UnsupportedBackward(
                    f"{self.names[place]} {how} since the step was planned, and with step_in_backward=True "
                    f"it is updated inside of the backward. lowtide.cap the model anew, {_WITHOUT}"
                )

    def refuse_scaled(self, tangents: Any) -> None:
        """Refuse a loss that was multiplied after the step, as GradScaler does."""
        came = [each for each in tangents if isinstance(each, torch.Tensor) and each.numel() == 1]
        on_device = any(each.device.type != "cpu" for each in came)
        if not came or (on_device and not self.looks):
            return
        self.looks -= on_device
        factors = [float(each.detach()) for each in came]
        if 1.0 not in factors:
            raise UnsupportedBackward(
                f"the loss was multiplied by {factors[0]:g} after the captured step, as torch.amp.GradScaler "
                "does, or a division by the number of batches to accumulate: with step_in_backward=True the "
                "parameters would be updated by such gradients. Train in bfloat16, which needs no scaler; "
                f"put a factor of your own into what is capped, {_WITHOUT}"
            )

    def note(self, updates: Updates) -> None:
        """Note which parameters are updated, and how often each optimizer had stepped before."""
        self.caller.updated = list(map(weakref.ref, updates.parameters.values()))
        for optimizer in self.optimizers:
            self.caller.steps[id(optimizer)] = seen(optimizer).steps


def _will_run(end: Any) -> bool:
    try:
        return bool(private("engine_will_run")(end))
    except RuntimeError:  # autograd.grad takes the gradient of this very leaf
        return False


_callers: weakref.WeakSet[Caller] = weakref.WeakSet()
_hooks: list[Any] = []


def _look_at_steps(caller: Caller) -> None:
    _callers.add(caller)
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_before_step))


def _before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Refuse to step where a parameter got a gradient after it was updated inside of the backward."""
    if torch.compiler.is_compiling() or not _callers:
        return
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for caller in list(_callers):
        if late := sum(id(p) in own and p.grad is not None for p in _alive(caller.updated)):
            raise UnsupportedBackward(
                f"{late} parameters of {caller.name} were updated inside of the backward, and have got "
                "another gradient since, from outside of the captured step (a penalty on weights that is "
                "computed outside, or a second use of the parameter). Put all that reads them into what is "
                f"capped, {_WITHOUT}"
            )
        caller.updated = [weakref.ref(p) for p in _alive(caller.updated) if id(p) not in own]


def _alive(refs: Sequence[weakref.ref[torch.Tensor]]) -> list[torch.Tensor]:
    return [tensor for ref in refs if (tensor := ref()) is not None]
