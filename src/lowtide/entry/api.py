"""The public verbs: cap, uncap, plan, plan_of."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import torch

from .._torch import private, private_of, usual_stance
from ..arguments import mapping, step
from ..capture.branches import Branches, following_branches
from ..capture.joint_graph import capturing
from ..capture.meta_model import fakes_for_meta
from ..capture.rewrites.recurrent import are_captured
from ..capture.torch_errors import OnlyPlanned, clear_errors, users_error
from ..console.call_fit import misfit, takes_by_name
from ..console.log import planning
from ..errors import CaptureError, GraphBreak, LowtideError
from ..measuring.trial import modules_of
from ..options import Options
from ..pipeline.compiled_calls import captured, unmarked
from ..pipeline.in_flight import Caller
from ..pipeline.optimizer_steps import capped_around, forget, watch
from ..pipeline.plan_notes import notes_on_ranks
from ..pipeline.runnable_step import runnable
from ..pipeline.stepping import refuse_ranks
from ..plans.planned_step import Plan
from ..process_wide import nothing_left
from ..ranks.simulated_ranks import one_of_ranks
from ..sharded.fsdp_groups import holds_sharded
from ..sketching.marker import leaving_marks
from ..stages import Asked
from ..units import Budget
from .capped import Capped
from .in_backward import refuse_unless_it_can_step
from .in_place import capped_of, put, remove, replaced
from .whole_steps import refuse_lazy, refuse_part, refuse_what_is_not_captured
from .wrappers import called_by, refuse_sharded, refuse_wrappers

__all__ = ["cap", "plan", "plan_of", "uncap"]

_call_module = private("call_module")

F = TypeVar("F", bound=Callable[..., Any])


def cap(
    model: F,
    budget: int | str | Budget | None = None,
    *,
    executor: str = "eager",
    method: str = "auto",
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    step_in_backward: bool = False,
    **options: Any,
) -> F:
    """Cap the peak memory of a training step, in place for a module; returns the model.

    The budget is the whole peak on the device, in bytes or as in "8GiB", "60%" (of the step's uncapped peak),
    "90% of device" (of its memory), "free", "min", "knee". The plan is made at the first training call, for
    that batch's shapes. A plain callable is returned wrapped. Of DistributedDataParallel the module inside is
    capped, before or after it is wrapped. A copy of a capped module, by `copy.deepcopy` or pickling, is not
    capped.

    The executor "eager" runs the plan op by op: gradients, buffers and random state are bitwise those of the
    same step keeping everything. "inductor" compiles it into the fused kernels of torch.compile: the peak is
    that of the compiled buffers, and gradients agree with the same executor uncapped to the dtype's rounding.
    With `split=True` the head, the loss and MLPs may run a chunk of rows at a time where the budget needs it.
    With `step_in_backward` the optimizer updates each parameter inside of the backward, as soon as its
    gradient is complete, and the gradient goes. See `lowtide.options.Options` for the other options.

    >>> import lowtide, torch
    >>> model = lowtide.cap(torch.nn.Linear(4, 4), "1MiB")
    >>> model(torch.ones(2, 4)).sum().backward()
    >>> lowtide.plan_of(model).peak <= 2**20
    True
    """
    options.update(optimizer=optimizer, step_in_backward=step_in_backward)
    chosen = Options.make(budget, executor=executor, method=method, **options)
    if chosen.budget is None and chosen.plan is None:
        raise LowtideError('cap needs a budget, as in lowtide.cap(model, "8GiB"), or a plan=')
    step("cap", model)
    if not isinstance(model, torch.nn.Module):
        return _wrap(model, chosen)  # type: ignore[no-any-return]
    inside = called_by(model)
    refuse_wrappers(inside)
    cap_in_place(inside, chosen)
    return model


def cap_in_place(model: torch.nn.Module, options: Options) -> Capped:
    """Let the calls of a module go through plans."""
    inner = [name for name, part in model.named_modules() if name and capped_of(part) is not None]
    if inner:
        raise LowtideError(f"{inner[0]!r} inside this model is capped already; lowtide.uncap it first")
    if (parent := capped_around(model)) is not None:
        raise LowtideError(
            f"this model is part of a {parent}, which is capped already: a step has one budget. Cap the part "
            "that the training step calls, and lowtide.uncap the other"
        )
    if capped_of(model) is None and private_of(model, "compiled_call") is not None:
        raise LowtideError(
            "this model is compiled in place already (model.compile()); cap it instead of compiling it, or "
            'compile it with backend="lowtide"'
        )
    capped = _capped(model, options)
    put(model, capped)
    watch(capped)
    return capped


def _capped(model: torch.nn.Module, options: Options) -> Capped:
    if not holds_sharded(model):
        return Capped(_call_of(model), options, module=model)
    if options.step_in_backward:
        refuse_ranks(sharded=True)
    if options.split:
        raise LowtideError("split= is not there yet for models that fully_shard was called on: leave it out")
    if options.dynamic:
        raise LowtideError(
            "dynamic= is not there yet for models that fully_shard was called on, whose units are captured "
            "for each shape: leave it out"
        )
    from .capped_units import CappedUnits

    return CappedUnits(_call_of(model), options, module=model)


def _call_of(module: torch.nn.Module) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return _call_module(module, *args, **kwargs)

    return call


def _wrap(function: Callable[..., Any], options: Options) -> Any:
    capped = Capped(function, options)
    watch(capped)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return capped(*args, **kwargs)

    wrapper.__lowtide__ = capped  # type: ignore[attr-defined]
    return wrapper


def uncap(model: F) -> F:
    """Undo `cap`; returns the model, or the function that was wrapped.

    >>> import lowtide, torch
    >>> model = lowtide.cap(torch.nn.Linear(4, 4), "1MiB")
    >>> lowtide.uncap(model) is model
    True
    """
    capped = replaced(model) or capped_of(model)
    if capped is None:
        raise LowtideError("this model is not capped: there is nothing to undo")
    forget(capped)
    if isinstance(model, torch.nn.Module):
        remove(called_by(model))
        capped.let_go()
        return model
    return capped.function  # type: ignore[return-value]


def plan_of(model: Callable[..., Any]) -> Plan | None:
    """The plan of a capped model's last training call; None before the first one.

    >>> import lowtide, torch
    >>> model = lowtide.cap(torch.nn.Linear(4, 4), "1MiB")
    >>> print(lowtide.plan_of(model))
    None
    >>> model(torch.ones(2, 4)).sum().backward()
    >>> lowtide.plan_of(model).peak
    264
    """
    capped = capped_of(model)
    if capped is None:
        raise LowtideError("this model is not capped; lowtide.cap(model, budget) first")
    return capped.plan


def plan(
    model: Callable[..., Any],
    *batch: Any,
    budget: int | str | Budget | None = None,
    device: str | None = None,
    kwargs: dict[str, Any] | None = None,
    prices: str = "roofline",
    ranks: int | None = None,
    **options: Any,
) -> Plan:
    """The plan of a training step, made under fake tensors: nothing is computed, nothing allocated.

    `device` names a device that is not here, as in "H200" or "A100": its allocator's rounding, its memory and
    its rates are used. A module on the meta device is planned as on the CPU. A budget means what it means to
    `cap`; without one the plan keeps everything. Keyword arguments of the step go into `kwargs`. With `ranks`
    it is the step of one rank of a cluster that shares the parameters, gradients and optimizer state as
    `fully_shard` does, each rank with such a batch.

    >>> import lowtide, torch
    >>> model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    >>> lowtide.plan(model, torch.empty(512, 64)).peak
    1705992
    >>> lowtide.plan(model, torch.empty(512, 64), budget="1MiB").peak <= 2**20
    True
    """
    step("plan", model)
    kwargs = mapping("kwargs", kwargs)
    refuse_what_is_not_captured()
    refuse_sharded(module for _, module in modules_of(model))
    refuse_lazy(module for _, module in modules_of(model))
    chosen = Options.make(budget, prices=prices, **options)
    refuse_unless_it_can_step(chosen)
    if chosen.step_in_backward and ranks is not None:
        raise LowtideError("step_in_backward=True is for one device: leave ranks= or step_in_backward out")
    if chosen.dynamic:
        raise LowtideError("dynamic= is an option of lowtide.cap: a plan is of one batch. Leave it out")
    asked = Asked(chosen, target=None if device is None else str(device), only_plan=True)
    inputs: Any = (batch, kwargs)
    sharded = (
        one_of_ranks(model, inputs, ranks, chosen.optimizer) if ranks is not None else nullcontext(inputs)
    )
    function = _call_of(model) if isinstance(model, torch.nn.Module) else model

    def backend(module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        refuse_part(module)
        return runnable(asked, Caller(), module, inputs)

    recurrent = device is None and are_captured(module for _, module in modules_of(model))
    call = captured(function, backend, recurrent=recurrent)
    try:
        with (
            nothing_left(),
            capturing,
            planning(),
            clear_errors(),
            usual_stance(),
            leaving_marks(),
            following_branches() as branches,
            private("without_modes")(),
            torch.enable_grad(),
            unmarked(batch, kwargs),
            sharded as inputs,
            fakes_for_meta(model, inputs) as (args, named),
        ):
            call(*args, **named)
    except OnlyPlanned as ended:
        made = ended.plan
    except CaptureError as error:
        raise _told(error, model, batch, kwargs) from error.__cause__
    else:
        raise CaptureError("torch captured no graph: the step has no tensor operation")
    made = made if made.budget is None else made.with_bound()
    on_ranks = () if ranks is None else notes_on_ranks(made, ranks, asked.target)
    return replace(made, notes=(*made.notes, *on_ranks, *_notes_on_branches(branches), *_note_on_eval(model)))


def _notes_on_branches(branches: Branches) -> Iterator[str]:
    if branches.unpadded:
        yield (
            "the batch has no data that tells whether it is padded: planned for one that is not, as the "
            "model's attention then runs; pass a batch of real numbers for the other"
        )
    if branches.drawn:
        yield (
            "which parts of the step run is drawn (LayerDrop, say): planned for those that the present "
            "random state lets run"
        )


def _note_on_eval(model: Callable[..., Any]) -> tuple[str, ...]:
    if not isinstance(model, torch.nn.Module) or model.training:
        return ()
    return (
        "the model is in eval mode: dropout and BatchNorm are planned as they run there; model.train() "
        "first, for the step that trains",
    )


def _told(
    error: CaptureError, model: Callable[..., Any], batch: tuple[Any, ...], kwargs: dict[str, Any]
) -> CaptureError:
    """The error as its user should see it: the step's own, or with a hint at what was meant."""
    if error.may_be_users:
        _must_fit(model, batch, kwargs)
        error = users_error(error)
    whole = batch[0] if len(batch) == 1 and not kwargs else None
    if isinstance(whole, Mapping) and takes_by_name(model, whole):
        error.add_note("the batch is one dict whose keys the model takes by name: is kwargs=batch meant?")
    if isinstance(error, GraphBreak):
        error.add_note(
            "if only the first call of the model does this (it may install hooks, or make a cache), call it "
            "once before, as in `with torch.no_grad(): model(batch)`; lowtide.cap does so, plan runs nothing"
        )
    return error


def _must_fit(model: Callable[..., Any], batch: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a batch that the model cannot be called with; a capped call raises Python's own error."""
    function = getattr(model, "forward", model)
    reason = misfit(function, *batch, **kwargs)
    if reason is None:
        return
    name = getattr(function, "__qualname__", type(model).__name__)
    given = ", ".join([*(type(each).__name__ for each in batch), *(f"{key}=" for key in kwargs)])
    raise CaptureError(
        f"{name}({_shown(inspect.signature(function))}) cannot be called with ({given}): {reason}. A step is "
        "model(*batch, **kwargs): a tuple or a dict counts as one argument unless it is unpacked, and "
        "named arguments go into kwargs={...}"
    ) from None


def _shown(signature: inspect.Signature, most: int = 6) -> str:
    names = list(signature.parameters)
    return ", ".join(names if len(names) <= most else [*names[:most], "..."])
