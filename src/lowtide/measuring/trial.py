"""A training step that can be run from the same state again and again, and leaves everything as it was."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from .._torch import private, private_of
from ..devices.optimizers import each_optimizer
from ..errors import NothingToTrain
from ..torch_state.autocast_state import in_state, present_state
from .measurement import Measurement, measure
from .module_state import Attributes
from .optimizer_state import OptimizerState

__all__ = ["Steps", "Trial"]

Steps = list[dict[str, Any]]
"""What came out of steps that were run one after another."""


class Trial:
    """A step that can be run from the same state again and again.

    One that `lets_go` does not hold what the model returned while its backward runs. Where an optimizer or
    several are `stepping`, they step after each backward, and a second step goes on from the first.
    """

    def __init__(
        self,
        model: Any,
        batch: Any,
        kwargs: Any,
        loss: Any,
        *,
        stepping: Any = None,
        lets_go: bool = False,
    ) -> None:
        self.inputs = (batch, kwargs)
        self.loss = loss
        self.lets_go = lets_go
        self.stepping = [OptimizerState(optimizer) for optimizer in each_optimizer(stepping)]
        modules = modules_of(model)
        self.parameters = {f"{at}{n}": p for at, module in modules for n, p in module.named_parameters()}
        self.buffers = [
            (f"{at}{path}", owner, name, tensor)
            for at, module in modules
            for path, owner, name, tensor in _buffers(module)
        ]
        # On the host: a copy on the device would be in the measured peak.
        self.kept_parameters = {n: p.detach().to("cpu", copy=True) for n, p in self.parameters.items()}
        self.kept_buffers = [tensor.detach().clone() for _, _, _, tensor in self.buffers]
        self.kept_gradients = {name: parameter.grad for name, parameter in self.parameters.items()}
        self.random = _random_state()
        self.generators = {one: one.get_state() for _, module in modules for one in _generators(module)}
        self.autocast = present_state()
        self.resident: list[torch.Tensor] = []
        self.attributes = Attributes(module for _, module in modules)

    def start_again(self) -> None:
        """Be as before the first run: what that installed (hooks, caches, flags) is gone, too."""
        self.attributes.restore()
        self.restore()

    @contextmanager
    def starting_here(self) -> Iterator[None]:
        """Let what modules hold now be what they start from, for a while."""
        before, self.attributes = self.attributes, Attributes(self.attributes.kept)
        try:
            yield
        finally:
            self.attributes = before

    def run_twice(self, model: Any) -> tuple[Steps, Measurement]:
        """Two steps, each from the kept tensors, of which the second is measured."""
        first, _ = self.run(model)
        # The second is measured: in the first a model may compile, cache masks, or let libraries allocate.
        second, taken = self.run(model, going_on=bool(self.stepping))
        return [first, second], taken

    def run_from_the_start(self, model: Any) -> tuple[Steps, Measurement]:
        """Two steps of a model that was not called before."""
        self.start_again()
        return self.run_twice(model)

    def restore(self) -> None:
        with torch.no_grad():
            for (_, owner, name, tensor), kept in zip(self.buffers, self.kept_buffers, strict=True):
                private_of(owner, "buffers")[name] = tensor.copy_(kept)
        for name in self.changed():
            # Through `.data`, so that no version counts up: autograd would refuse graphs that hold the
            # parameter.
            self.parameters[name].data.copy_(self.kept_parameters[name])
        for name, parameter in self.parameters.items():
            parameter.grad = self.kept_gradients[name]
        for state in self.stepping:
            state.restore()
        _set_random_state(self.random)
        for generator, drawn in self.generators.items():
            generator.set_state(drawn)

    def changed(self) -> list[str]:
        """The parameters that are not as they were: a step may write to those of a teacher."""
        kept = self.kept_parameters
        return [name for name, p in self.parameters.items() if not torch.equal(p.detach().cpu(), kept[name])]

    def run(self, model: Any, *, going_on: bool = False) -> tuple[dict[str, Any], Measurement]:
        """One step from the kept state, or from that of the last: what came out, and what it took."""
        if not going_on:
            self.restore()
        for parameter in self.parameters.values():
            parameter.grad = None
        batch, kwargs = private("tree_map_only")(torch.Tensor, _leaf_copy, self.inputs)
        holder: list[Any] = []

        def step() -> None:  # as in a training loop: the backward is outside of autocast
            with in_state(self.autocast):
                output = model(*batch, **kwargs)
                ends = self.ends(output)
            if self.lets_go:
                output = _host_copies(output)
            holder.append(output)
            torch.autograd.backward(*ends)

        held = [tensor for state in self.stepping for tensor in state.tensors()]
        with in_state(()):
            taken = measure(step, device=self.device(), resident=[*self.resident, *held])
        for state in self.stepping:
            state.step()
        return self.results(holder[0], batch, kwargs), taken

    def draws(self, results: Mapping[str, Any]) -> bool:
        """Whether a step that came to these results has drawn random numbers."""
        return any(
            not torch.equal(state.cpu(), results[f"random state {name}"])
            for name, state in self.random.items()
            if f"random state {name}" in results
        )

    def device(self) -> torch.device:
        tensors = [*self.parameters.values(), *_tensors(self.inputs)]
        return next((t.device for t in tensors if t.device.type == "cuda"), torch.device("cpu"))

    def ends(self, output: Any) -> tuple[Any, ...]:
        """What backward is called on: the loss, the scalars, or all outputs with made-up gradients."""
        if self.loss is not None:
            return (self.loss(output),)
        outputs = _once([t for t in _tensors(output) if t.requires_grad])
        if not outputs:
            raise NothingToTrain("no output of the step needs a gradient: is every parameter frozen?")
        scalars = [t for t in outputs if t.numel() == 1]
        if scalars:
            return (scalars,)
        end = _MadeUpLoss.apply(*outputs)
        return end, torch.empty_like(end)

    def results(self, output: Any, batch: Any, kwargs: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for index, tensor in enumerate(_tensors(output)):
            found[f"outputs {index}"] = _bits(tensor)
        for name, parameter in self.parameters.items():
            if not self.stepping or parameter.grad is not None:  # an optimizer that steps uses them up
                found[f"gradients {name}"] = _bits(parameter.grad)
        for name in self.changed():
            found[f"parameters {name}"] = _bits(self.parameters[name])
        for index, tensor in enumerate(_tensors((batch, kwargs))):
            if tensor.requires_grad:
                found[f"gradients of input {index}"] = _bits(tensor.grad)
        for path, owner, name, _ in self.buffers:
            found[f"buffers {path}"] = _bits(private_of(owner, "buffers")[name])
        for name, state in _random_state().items():
            found[f"random state {name}"] = _bits(state)
        for index, generator in enumerate(self.generators):
            found[f"random state of generator {index}"] = _bits(generator.get_state())
        for optimizer in self.stepping:
            found.update(optimizer.results(self.parameters))
        return found


def modules_of(model: Any) -> list[tuple[str, torch.nn.Module]]:
    """The modules behind a callable, with a prefix for their names: itself, or what a function holds."""
    if isinstance(model, torch.nn.Module):
        return [("", model)]
    if isinstance(model, functools.partial):
        held = [*zip(map(str, range(len(model.args))), model.args, strict=True), *model.keywords.items()]
        return [*modules_of(model.func), *_modules_among(held)]
    owner = getattr(model, "__self__", None)
    closure = inspect.getclosurevars(model) if inspect.isfunction(inspect.unwrap(model)) else None
    held = [*closure.nonlocals.items(), *closure.globals.items()] if closure else []
    return _modules_among([("self", owner), *held])


def _modules_among(held: list[tuple[str, Any]]) -> list[tuple[str, torch.nn.Module]]:
    return [(f"{name}.", item) for name, item in held if isinstance(item, torch.nn.Module)]


def _buffers(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, str, torch.Tensor]]:
    """Each buffer by its path and where it hangs: a step may put another tensor in its place."""
    for path, owner in module.named_modules():
        for name, tensor in private_of(owner, "buffers").items():
            if tensor is not None:
                yield f"{path}.{name}".lstrip("."), owner, name, tensor


def _generators(module: torch.nn.Module) -> list[torch.Generator]:
    """The random generators that modules have as attributes."""
    held = (item for part in module.modules() for item in vars(part).values())
    return [item for item in held if isinstance(item, torch.Generator)]


def _leaf_copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _tensors(tree: Any) -> list[torch.Tensor]:
    """Tensors of a nest of containers, dataclasses included."""
    found = []
    for leaf in private("tree_leaves")(tree):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif hasattr(leaf, "__dataclass_fields__"):
            found += _tensors([getattr(leaf, name) for name in leaf.__dataclass_fields__])
    return found


def _once(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Each tensor once: autograd would add the gradients of one returned twice, outside of the step."""
    return list({id(tensor): tensor for tensor in tensors}.values())


class _MadeUpLoss(torch.autograd.Function):
    """Stands for a loss outside of the step: takes outputs, gives them gradients, holds no bytes."""

    @staticmethod
    def forward(ctx: Any, *outputs: torch.Tensor) -> torch.Tensor:
        ctx.shapes = [(t.shape, t.dtype, t.device) for t in outputs]
        return outputs[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        return tuple(
            torch.linspace(-1, 1, shape.numel(), dtype=dtype, device=device).view(shape)
            for shape, dtype, device in ctx.shapes
        )


def _bits(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """A copy on the host: what is kept for comparing must not count on the device."""
    return None if tensor is None else tensor.detach().to("cpu", copy=True)


def _host_copies(output: Any) -> list[torch.Tensor | None]:
    """What is compared of an output, which can be let go of then; the copies are not measured."""
    with private("without_modes")():
        return [_bits(tensor) for tensor in _tensors(output)]


def _random_state() -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_random_state(state: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
