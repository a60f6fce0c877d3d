"""The `training_step` of a LightningModule under a cap: captured whole, or its network capped instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from .._torch import private, private_of, set_private
from ..console.log import log
from ..entry.api import cap_in_place
from ..entry.capped import Capped
from ..entry.in_place import capped_of, put, remove
from ..errors import CaptureError, LowtideError
from ..options import Options
from ..pipeline.optimizer_steps import forget, watch
from ..plans.planned_step import Plan
from .deferred_calls import DeferredCalls

__all__ = ["TrainingStep"]

_call_module = private("call_module")

PATIENCE = 3
"""Batches in a row that are captured anew for the same shapes, before only the network is capped; chosen."""


class TrainingStep:
    """Calls `training_step` under a cap. `plan` is the one of the last call, None before the first one."""

    def __init__(self, module: Any, options: Options, *, part: str | None) -> None:
        self.module = module
        self.options = options
        self.step: Callable[..., Any] = module.training_step
        self.deferred = _deferred_of(module)
        self.other = _OtherArguments()
        self.capped: Capped | None = None
        self.whole = False
        self.captured = 0
        self.shapes = 0
        self.anew = 0
        self.reason = ""
        _refuse_what_is_capped(module)
        self.__wrapped__ = self.step  # by which Lightning sees what the step takes
        if part is not None:
            self.capped = cap_in_place(_part_of(module, part), options)
            self.lift()
        elif module.automatic_optimization:
            self.cap_whole()
        else:
            self.reason = "with automatic_optimization = False it calls backward itself"

    def cap_whole(self) -> None:
        """Cap the whole step as a function of the batch."""
        self.whole = True
        self.capped = _WholeStep(self.captured_function(), self.options, of=self.module)
        watch(self.capped)

    def captured_function(self) -> Callable[..., Any]:
        """The step as a function of the batch that gives its output and the calls that it left for later."""
        step, noted, other = self.step, self.deferred.noted, self.other

        def training_step(batch: Any) -> Any:
            noted.clear()
            output = step(batch, *other.values)
            calls = list(noted)
            noted.clear()
            return output, calls

        return training_step

    @property
    def plan(self) -> Plan | None:
        """The plan of the last call."""
        return None if self.capped is None else self.capped.plan

    def __call__(self, batch: Any, *other: Any) -> Any:
        if self.capped is None:
            return self.cap_network_of(batch, *other)
        if not self.whole:
            return self.call_with_network(self.capped, batch, *other)
        self.other.values = other
        try:
            with self.deferred.noting():
                output, noted = self.capped(batch)
        except CaptureError as error:
            self.give_up(str(error).partition(" A byte cap")[0].rstrip("."))
            return self.cap_network_of(batch, *other)
        output = self.deferred.call(output, noted)
        return self.note_captures(output)

    def call_with_network(self, capped: Capped, *args: Any) -> Any:
        """Call the step with the cap of its network in force; DDP calls the module around that, too."""
        assert capped.module is not None
        put(capped.module, capped)
        try:
            output = self.step(*args)
        finally:
            self.lift()
        return self.note_captures(output)

    def lift(self) -> None:
        """Let the network be uncapped between the steps."""
        if self.capped is not None and self.capped.module is not None:
            remove(self.capped.module)

    def note_captures(self, output: Any) -> Any:
        """Count how often the step was captured: a whole step may read what changes from batch to batch."""
        assert self.capped is not None
        parts = [len(entry.parts) for entry in self.capped.entries.values() if entry.parts]
        new_shape = len(parts) > self.shapes
        again = sum(parts) > self.captured and not new_shape
        self.captured, self.shapes = sum(parts), len(parts)
        self.anew = self.anew + 1 if again else 0
        if self.whole and self.anew == PATIENCE:
            self.give_up(
                "it reads Python values that change from batch to batch (batch_idx, global_step, a learning "
                "rate, ...), and each would need a plan of its own; on_train_batch_end is a place for such"
            )
        return output

    def give_up(self, reason: str) -> None:
        """Take the cap from the whole step; the next call caps its network."""
        assert self.capped is not None
        forget(self.capped)
        self.capped, self.whole, self.reason = None, False, reason

    def cap_network_of(self, *args: Any) -> Any:
        """Run a step that caps the first module that it calls, which must be all that it trains."""
        try:
            with _told_of_first_call(self.module, self.cap_network):
                output = self.step(*args)
        finally:
            self.lift()
        if self.capped is None and output is not None:
            self.refuse("and it calls no module that holds all that it trains")
        return output if self.capped is None else self.note_captures(output)

    def cap_network(self, network: torch.nn.Module) -> None:
        """Cap the network of a step that cannot be captured whole."""
        name = _path(self.module, network)
        left = set(map(id, _trained(self.module))) - set(map(id, network.parameters()))
        if left:
            self.refuse(f"and {name} is only a part of what it trains")
        self.capped = cap_in_place(network, self.options)
        self.captured = self.shapes = 0
        log.warning(
            f"{self.name} is not planned as a whole: {self.reason}. Its network {name} is capped instead; of "
            "what the step does outside of it, the plan knows only what outside= sets aside"
        )

    def refuse(self, finding: str) -> NoReturn:
        """Refuse a step that cannot be capped."""
        raise CaptureError(
            f"{self.name} cannot be capped as a whole: {self.reason}; {finding}. Name the part to cap, as in "
            'Cap("8GiB", module="encoder"), knowing that the rest of the step is not in its plan; or let one '
            "module hold all that is trained, and training_step call it"
        )

    @property
    def name(self) -> str:
        """What a user calls the step."""
        return getattr(self.step, "__qualname__", "training_step")

    def remove(self) -> None:
        """Take the cap away, with its plans."""
        if self.capped is not None:
            forget(self.capped)
            self.capped.forget_plans()


class _WholeStep(Capped):
    """A step that is not run plainly where a capture failed: what it logs and prints would come twice."""

    def __init__(self, function: Callable[..., Any], options: Options, *, of: torch.nn.Module) -> None:
        self.of = of
        super().__init__(function, options)

    @property
    def name(self) -> str:
        return f"{type(self.of).__name__}.training_step"

    def modules(self) -> list[torch.nn.Module]:
        return [self.of]

    def install(
        self, error: CaptureError, attempt: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> str:
        raise error


class _OtherArguments:
    """What the step gets besides the batch (its index): no plan depends on it unless the step reads it."""

    values: tuple[Any, ...] = ()


def _deferred_of(module: Any) -> DeferredCalls:
    """The calls of a LightningModule that torch cannot capture: its log, and the metrics of torchmetrics."""
    deferred = DeferredCalls()
    deferred.leave(module, "log", "log_dict", copied=True)
    for part in module.modules():
        if any(kind.__name__ in _METRICS for kind in type(part).__mro__):
            deferred.leave(part, "forward", "update", "compute", "reset", copied=False)
    return deferred


_METRICS = ("Metric", "MetricCollection")
"""Classes of torchmetrics, by name: it comes with Lightning, but not with Lowtide."""


def _refuse_what_is_capped(module: torch.nn.Module) -> None:
    inner = [name for name, part in module.named_modules() if capped_of(part) is not None]
    if inner:
        raise LowtideError(
            f"{inner[0] or type(module).__name__!r} is capped already, and a step has one budget: "
            "lowtide.uncap it, or leave the callback out"
        )


def _part_of(module: torch.nn.Module, path: str) -> torch.nn.Module:
    try:
        return module.get_submodule(path)
    except AttributeError:
        known = ", ".join(name for name, _ in module.named_children())
        raise LowtideError(
            f"module={path!r} is not a module of {type(module).__name__}; it has {known}"
        ) from None


def _path(module: torch.nn.Module, part: torch.nn.Module) -> str:
    name = next(name for name, each in module.named_modules() if each is part)
    return f"self.{name}" if name else "self"


def _trained(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


@contextmanager
def _told_of_first_call(module: torch.nn.Module, tell: Callable[[torch.nn.Module], None]) -> Iterator[None]:
    """Tell which of a module and its parts is called first; it is called as it is then."""
    candidates = [part for part in (module, *_called_parts(module)) if _trained(part)]

    def end() -> None:
        for part in candidates:
            set_private(part, "compiled_call", None)
        candidates.clear()

    def stand_in(part: torch.nn.Module) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled() or not part.training:
                return _call_module(part, *args, **kwargs)
            end()
            tell(part)
            return part(*args, **kwargs)

        return call

    for part in candidates:
        if private_of(part, "compiled_call") is not None:
            raise LowtideError(
                f"{_path(module, part)} is compiled in place already; cap it instead of compiling it"
            )
        set_private(part, "compiled_call", stand_in(part))
    try:
        yield
    finally:
        end()


def _called_parts(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The parts of a module that its code can call: its children, and those in lists and dicts of them."""
    for child in module.children():
        if isinstance(child, torch.nn.ModuleList | torch.nn.ModuleDict):
            yield from _called_parts(child)
        else:
            yield child
