"""Proof on the user's own model: the step with and without a cap, compared bit by bit.

Both runs start from the same parameters, buffers, batch and random state; outputs, every gradient, every
buffer and the random state afterwards are compared as bits, and the measured peak with the predicted one.
Afterwards the model, its gradients and the random state are as they were.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ._torch import private
from .api import _capped, cap, plan_of, uncap
from .errors import LowtideError, NothingToTrain
from .measure import Measurement, measure
from .plan import Plan
from .units import Budget, format_bytes, format_seconds

__all__ = ["Verification", "verify"]


@dataclass(frozen=True)
class Verification:
    """What `verify` found; prints as a table. `ok` when all is equal and the measured peak was kept.

    `different` are the tensors that differ from plain PyTorch, `different_uncapped` those that differ from
    the same captured step keeping everything, `unstable` those in which plain PyTorch differs from itself.
    """

    plan: Plan
    uncapped: Measurement
    capped: Measurement
    compared: dict[str, int]
    different: tuple[str, ...]
    different_uncapped: tuple[str, ...] = ()
    unstable: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """Whether every compared tensor is that of plain PyTorch, bit for bit."""
        return not self.different

    @property
    def exact(self) -> bool:
        """Whether every compared tensor is that of the same captured step keeping everything."""
        return not self.different_uncapped

    @property
    def predicted(self) -> int:
        """The predicted peak in bytes."""
        return self.plan.peak

    @property
    def measured(self) -> int:
        """The measured peak in bytes."""
        return self.capped.peak

    @property
    def ok(self) -> bool:
        """Equal, and the measured peak neither above the prediction nor above the budget."""
        limit = self.predicted if self.plan.budget is None else min(self.predicted, self.plan.budget)
        return self.equal and self.measured <= limit

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        budget = "smallest" if self.plan.budget is None else format_bytes(self.plan.budget)
        slower = self.capped.seconds / self.uncapped.seconds - 1
        rows = [
            ("uncapped peak", format_bytes(self.uncapped.peak), "measured, plain PyTorch"),
            ("budget", budget, ""),
            ("predicted peak", format_bytes(self.predicted), f"{self.predicted} bytes"),
            ("measured peak", format_bytes(self.measured), f"{self.measured} bytes, {self.match()}"),
            ("step time", format_seconds(self.capped.seconds), f"{slower:+.0%}, one step, not a benchmark"),
        ]
        for noun, count in self.compared.items():
            bad = sum(name.startswith(noun) for name in self.different)
            rows.append((noun, f"{count - bad} of {count}", "bitwise equal"))
        lines = [f"  {name:15} {figure:>12}  {remark}".rstrip() for name, figure, remark in rows]
        if self.different and self.exact:
            lines.append(
                "  note: the captured step itself rounds differently from plain PyTorch (an in-place op or a "
                "layout that tracing changes); the cap changed no bit of it"
            )
        if self.unstable:
            lines.append(
                f"  note: plain PyTorch differs from itself from run to run in {len(self.unstable)} of these"
            )
        lines += [f"  differs: {name}" for name in self.different[:10]]
        return "\n".join([f"verified: {'yes' if self.ok else 'NO'}", *lines])

    def match(self) -> str:
        """How the measured peak compares with the predicted one."""
        gap = self.measured - self.predicted
        return "as predicted" if gap == 0 else f"{gap:+d} bytes ({gap / self.predicted:+.2%})"


def verify(
    model: Callable[..., Any],
    *batch: Any,
    budget: int | str | Budget,
    kwargs: dict[str, Any] | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    **options: Any,
) -> Verification:
    """Run a training step with and without a cap and compare them bit by bit.

    `loss` turns the model's output into what backward is called on; without it the scalar outputs are used,
    or all outputs with made-up gradients where there is no scalar. Of a plain function, the modules that it
    holds in its closure, its globals or as its owner are compared and put back.

    >>> bool(verify(torch.nn.Linear(4, 4), torch.ones(2, 4), budget="min"))
    True
    """
    if loss is None:
        options.setdefault("outside", 0)  # the made-up loss holds nothing
    if _capped(model) is not None:
        raise LowtideError("verify takes a model that is not capped; lowtide.uncap it first")
    trial = _Trial(model, batch, kwargs or {}, loss)
    try:
        plain, uncapped = trial.run(model)
        capped, peak, plan = _run_capped(trial, model, budget, options)
        different = _differences(plain, capped)
        reference = plain
        unstable: tuple[str, ...] = ()
        if different:
            unstable = _differences(plain, trial.run(model)[0])
            reference, _, _ = _run_capped(
                trial, model, "free", {**options, "method": "keep_all", "plan": None}
            )
    finally:
        trial.restore()
    found = (different, _differences(reference, capped))
    different, inexact = (tuple(name for name in names if name not in unstable) for names in found)
    compared: dict[str, int] = {}
    for name in plain:
        noun = name.partition(" ")[0]
        compared[noun] = compared.get(noun, 0) + 1
    return Verification(plan, uncapped, peak, compared, different, inexact, unstable)


def _run_capped(
    trial: _Trial, model: Any, budget: Any, options: dict[str, Any]
) -> tuple[dict[str, Any], Measurement, Plan]:
    """The second of two capped steps: the first one plans."""
    capped = cap(model, budget, **options)
    try:
        trial.run(capped)
        results, taken = trial.run(capped)
        plan = plan_of(capped)
    finally:
        uncap(capped)
    if plan is None:
        raise NothingToTrain(
            "the step was never planned: is the model in eval mode? Call model.train() first."
        )
    return results, taken, plan


def _differences(left: dict[str, Any], right: dict[str, Any]) -> tuple[str, ...]:
    names = [*left, *(name for name in right if name not in left)]
    return tuple(name for name in names if not _same(left.get(name), right.get(name)))


class _Trial:
    """A step that can be run from the same state again and again."""

    def __init__(self, model: Any, batch: Any, kwargs: Any, loss: Any) -> None:
        self.inputs = (batch, kwargs)
        self.loss = loss
        modules = modules_of(model)
        self.parameters = {f"{at}{n}": p for at, module in modules for n, p in module.named_parameters()}
        self.buffers = [
            (f"{at}{path}", owner, name, tensor)
            for at, module in modules
            for path, owner, name, tensor in _buffers(module)
        ]
        self.kept_buffers = [tensor.detach().clone() for _, _, _, tensor in self.buffers]
        self.kept_gradients = {name: parameter.grad for name, parameter in self.parameters.items()}
        self.random = _random_state()

    def restore(self) -> None:
        with torch.no_grad():
            for (_, owner, name, tensor), kept in zip(self.buffers, self.kept_buffers, strict=True):
                owner._buffers[name] = tensor.copy_(kept)
        for name, parameter in self.parameters.items():
            parameter.grad = self.kept_gradients[name]
        _set_random_state(self.random)

    def run(self, model: Any) -> tuple[dict[str, Any], Measurement]:
        """One step from the kept state: what came out, and what it took."""
        self.restore()
        for parameter in self.parameters.values():
            parameter.grad = None
        batch, kwargs = private("tree_map_only")(torch.Tensor, _leaf_copy, self.inputs)
        holder: list[Any] = []

        def step() -> None:
            output = model(*batch, **kwargs)
            holder.append(output)
            self.backward(output)

        taken = measure(step, device=self.device())
        return self.results(holder[0], batch, kwargs), taken

    def device(self) -> torch.device:
        tensors = [*self.parameters.values(), *_tensors(self.inputs)]
        return next((t.device for t in tensors if t.device.type == "cuda"), torch.device("cpu"))

    def backward(self, output: Any) -> None:
        if self.loss is not None:
            self.loss(output).backward()
            return
        outputs = [t for t in _tensors(output) if t.requires_grad]
        if not outputs:
            raise NothingToTrain("no output of the step needs a gradient: is every parameter frozen?")
        scalars = [t for t in outputs if t.numel() == 1]
        if scalars:
            torch.autograd.backward(scalars)
        else:
            end = _MadeUpLoss.apply(*outputs)
            torch.autograd.backward(end, torch.empty_like(end))

    def results(self, output: Any, batch: Any, kwargs: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for index, tensor in enumerate(_tensors(output)):
            found[f"outputs {index}"] = _bits(tensor)
        for name, parameter in self.parameters.items():
            found[f"gradients {name}"] = _bits(parameter.grad)
        for index, tensor in enumerate(_tensors((batch, kwargs))):
            if tensor.requires_grad:
                found[f"gradients of input {index}"] = _bits(tensor.grad)
        for path, owner, name, _ in self.buffers:
            found[f"buffers {path}"] = _bits(owner._buffers[name])
        for name, state in _random_state().items():
            found[f"random state {name}"] = _bits(state)
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
        for name, tensor in owner._buffers.items():
            if tensor is not None:
                yield f"{path}.{name}".lstrip("."), owner, name, tensor


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


def _same(left: torch.Tensor | None, right: torch.Tensor | None) -> bool:
    if left is None or right is None:
        return left is right
    if (left.shape, left.dtype) != (right.shape, right.dtype):
        return False
    flat = [t.contiguous().reshape(-1).view(torch.uint8) for t in (left, right)]
    return torch.equal(*flat)


def _random_state() -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_random_state(state: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
