"""Proof on the user's own model: the step with and without a cap, compared bit by bit.

Two capped steps are run on the model as it is handed over, and then two plain ones, each from the same
parameters, buffers, batch and random state; outputs, every gradient, every buffer, parameters that the step
itself writes to and the random state afterwards are compared as bits, first step with first and second with
second, and the measured peak of the second with the predicted one. What the first call installs (hooks,
caches) is taken away in between. A
compiled step rounds differently from plain PyTorch, and draws other random numbers: it is compared with the
same executor keeping everything, to half of the digits of each dtype. Where the plan chose which layers keep
a sketch, the others keep none in the runs to compare with. Where it keeps some rows of an input, weight
gradients are compared to half of their digits. A step that runs in chunks of rows is compared with the same
chunks keeping everything, bit by bit, and with plain PyTorch to half of the digits; how far both are from
double precision is told. Where the optimizer steps inside of the backward, it does so after the plain ones,
the second step goes on from the first, and parameters and optimizer state are compared. Afterwards the model,
its gradients, the optimizer and the random state are as they were.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..arguments import function, mapping
from ..arguments import step as check_step
from ..console.log import silence
from ..entry.api import cap, plan_of, uncap
from ..entry.capped import IN_A_LOOP
from ..entry.in_place import capped_of
from ..entry.whole_steps import refuse_lazy
from ..errors import LowtideError, NothingToTrain
from ..measuring.measurement import Measurement
from ..measuring.trial import Steps, Trial, modules_of
from ..pipeline.optimizer_steps import present_state
from ..plans.planned_step import BY_REPLAY, Plan
from ..sketching.planned import as_planned, weights_of
from ..units import Budget, format_bytes, format_seconds
from .double_precision import Rounding, rounding_of

__all__ = ["Verification", "verify"]

AGAIN = 2
"""Plain runs that are compared with the first one where a capped step differs: is the step itself stable?"""

LISTED = 10
"""The most tensors that are listed by name where they differ."""


@dataclass(frozen=True)
class Verification:
    """What `verify` found; prints as a table. `ok` when all is equal and the measured peak was kept.

    `different` are the tensors that differ from plain PyTorch, `different_uncapped` those that differ from
    the same captured step keeping everything, `unstable` those in which plain PyTorch differs from itself,
    `far` those that differ from plain PyTorch by more than rounding, `only_first` those that differ in
    the first step, which plans, and not in the second.
    Of a `compiled` step both are those that differ from the same executor keeping everything. `rounding` has
    the errors against double precision where the step ran in chunks of rows.

    >>> import lowtide, torch
    >>> found = lowtide.verify(torch.nn.Linear(4, 4), torch.ones(2, 4), budget="min")
    >>> found.ok, found.predicted == found.measured
    (True, True)
    """

    plan: Plan
    uncapped: Measurement
    capped: Measurement
    compared: dict[str, int]
    different: tuple[str, ...]
    different_uncapped: tuple[str, ...] = ()
    unstable: tuple[str, ...] = ()
    compiled: bool = False
    far: tuple[str, ...] = ()
    only_first: tuple[str, ...] = ()
    rounding: Rounding | None = None

    @property
    def equal(self) -> bool:
        """Whether every compared tensor is that of plain PyTorch, bit for bit (compiled: to rounding)."""
        return not self.different

    @property
    def exact(self) -> bool:
        """Whether every compared tensor is that of the same captured step keeping everything."""
        return not self.different_uncapped

    @property
    def predicted(self) -> int:
        """The predicted peak in bytes."""
        return self.plan.allocated

    @property
    def measured(self) -> int:
        """The measured peak in bytes."""
        return self.capped.peak

    @property
    def ok(self) -> bool:
        """Equal, and the measured peak neither above the prediction nor above the budget.

        A step that was asked to run in chunks of rows (`split=`) is equal to rounding.
        """
        return (self.equal or (bool(self.plan.split) and self.rounds)) and self.fits

    @property
    def rounds(self) -> bool:
        """Whether it differs from plain PyTorch by rounding alone, which the cap had no part in."""
        return self.exact and not self.far and not self.compiled

    @property
    def fits(self) -> bool:
        """Whether the measured peak is neither above the prediction nor above the budget."""
        budget = sys.maxsize if self.plan.budget is None else self.plan.budget
        if self.plan.reserved is not None and (self.capped.reserved or 0) > budget:
            return False
        return self.measured <= min(self.predicted, budget)

    @property
    def verdict(self) -> str:
        """The result in a word or two."""
        if self.ok and self.equal and not (self.compiled and self.plan.split):
            return "yes"
        return "to rounding" if self.fits and (self.rounds or self.equal) else "NO"

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
            *self._reserved(),
            ("step time", format_seconds(self.capped.seconds), f"{slower:+.0%}, one step, not a benchmark"),
        ]
        for noun, count in self.compared.items():
            bad = sum(name.startswith(noun) for name in self.different)
            how = "equal to rounding, same executor uncapped" if self.compiled else "bitwise equal"
            rows.append((noun, f"{count - bad} of {count}", how))
        lines = [f"  {name:15} {figure:>12}  {remark}".rstrip() for name, figure, remark in rows]
        if self.plan.split:
            lines.append(
                "  note: the step runs in chunks of rows, as split= asks for: what is summed over rows is "
                "equal to rounding" + ("; the cap changed no bit of it" if self.rounds else "")
            )
            if self.rounding is not None:
                lines.append(
                    f"  note: largest error of a gradient against fp64: {self.rounding.capped:.1e}, of plain "
                    f"PyTorch {self.rounding.plain:.1e}"
                )
        elif self.different and self.rounds:
            lines.append(
                "  note: the captured step itself rounds differently from plain PyTorch (an in-place op or a "
                "layout that tracing changes, or a branch of the model for torch.compile); the cap changed "
                "no bit of it"
            )
        if self.only_first:
            lines.append(
                f"  note: {len(self.only_first)} of these differ in the first step, which plans, alone"
            )
        if self.plan.trimmed and not self.compiled:
            lines.append(
                f"  note: weight gradients of {len(self.plan.trimmed)} layers come from the rows that have a "
                "gradient, and are equal to rounding"
            )
        if self.unstable:
            lines.append(
                f"  note: plain PyTorch differs from itself from run to run in {len(self.unstable)} of these"
            )
        lines += [f"  differs: {name}" for name in self.different[:LISTED]]
        if len(self.different) > LISTED:
            lines.append(f"  differs: {len(self.different) - LISTED} others")
        return "\n".join([f"verified: {self.verdict}", *lines])

    def _reserved(self) -> list[tuple[str, str, str]]:
        """What the allocator was to reserve and has reserved, where the plan says so."""
        told, found = self.plan.reserved, self.capped.reserved
        if told is None or found is None:
            return []
        gap = f"{found} bytes, {found - told:+d} ({(found - told) / told:+.2%})"
        return [("reserved", format_bytes(told), BY_REPLAY), ("measured", format_bytes(found), gap)]

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
    or all outputs with made-up gradients where there is no scalar. The outputs are held while the backward
    runs, unless `outputs="free"` asks for a step that lets go of them. Of a plain function, the modules that
    it holds in its closure, its globals or as its owner are compared and put back.

    >>> import lowtide, torch
    >>> print(lowtide.verify(torch.nn.Linear(4, 4), torch.ones(2, 4), budget="min"))
    verified: yes
    ...
    """
    check_step("verify", model)
    kwargs = mapping("kwargs", kwargs)
    if loss is None:
        options.setdefault("outside", 0)  # the made-up loss holds nothing
    else:
        function("loss", loss, "loss(output)")
    if capped_of(model) is not None:
        raise LowtideError(
            "verify runs the step without a cap and under its own, and this model is capped already; "
            "lowtide.uncap(model) first, and lowtide.cap it again afterwards"
        )
    refuse_lazy(module for _, module in modules_of(model))
    given = options.get("optimizer") if options.get("step_in_backward") else None
    lets_go = options.get("outputs") == "free"
    trial = Trial(model, batch, kwargs, loss, stepping=given, lets_go=lets_go)
    trial.resident = present_state(options.get("optimizer"), trial.parameters.values())
    try:
        # The capped steps come first, on the model as it is handed over: its first call may do things that
        # torch cannot capture, and a plain run would have done them already.
        capped, peak, plan = _run_capped(trial, model, budget, options)
        compiled = options.get("executor") == "inductor"
        unstable: tuple[str, ...] = ()
        weights = weights_of(modules_of(model), plan.trimmed)  # whose gradients come from fewer rows
        rounded = frozenset(f"gradients {n}" for n, p in trial.parameters.items() if p in weights)
        trial.start_again()
        # The plan may keep layers exact that are sketched without it.
        with as_planned(modules_of(model), plan.sketched), trial.starting_here():
            plain, uncapped = trial.run_from_the_start(model)
            different = () if compiled else _differences(plain, capped, rounded)
            reference = plain
            if different or compiled:
                keeping = {**options, "method": "keep_all", "plan": None}
                with silence():
                    if plan.split and not compiled:
                        reference, _, _ = _run_capped(
                            trial, model, None, {**options, "plan": _keeping_all(plan)}
                        )
                    else:
                        reference, _, _ = _run_capped(trial, model, "free", keeping)
            if different:
                again = [_differences(plain, trial.run_from_the_start(model)[0]) for _ in range(AGAIN)]
                unstable = tuple(dict.fromkeys(name for names in again for name in names))
            rounding = rounding_of(model, trial, plain[1], capped[1]) if plan.split else None
    finally:
        trial.start_again()
    if compiled:
        different = _differences(reference, capped, frozenset({*reference[0], *capped[0]}))
    found = (different, different if compiled else _differences(reference, capped, rounded))
    different, inexact = (tuple(name for name in names if name not in unstable) for names in found)
    lowest = [dtype for _, dtype in trial.autocast] if plan.split else []  # which sums are rounded to
    far = tuple(name for name in different if compiled or not _all_close(plain, capped, name, lowest))
    later = set() if compiled else {*_differences(plain[1:], capped[1:], rounded)}
    only_first = () if compiled else tuple(name for name in different if name not in later)
    compared: dict[str, int] = {}
    for name in plain[-1]:
        noun = name.partition(" ")[0]
        compared[noun] = compared.get(noun, 0) + 1
    return Verification(
        plan, uncapped, peak, compared, different, inexact, unstable, compiled, far, only_first, rounding
    )


def _keeping_all(plan: Plan) -> Plan:
    """The same step, in the same chunks, with everything kept."""
    kept = replace(plan, schedule=plan.kept_all, timeline=plan.uncapped, method="keep_all")
    return replace(kept, budget=None, reserved=None)


def _run_capped(
    trial: Trial, model: Any, budget: Any, options: dict[str, Any]
) -> tuple[Steps, Measurement, Plan]:
    """Two capped steps, of which the second is measured: the first one plans."""
    trial.start_again()
    capped = cap(model, budget, **options)
    try:
        first = trial.run(capped)[0] if options.get("allow_breaks") else None
        steps, taken = trial.run_twice(capped)
        if first is not None:  # pieces are planned together in the second or in the third step
            steps = [first, steps[-1]]
        plan = plan_of(capped)
    finally:
        uncap(capped)
    if plan is None:
        raise NothingToTrain(
            "the step was never planned, and ran plainly. Is the model in eval mode? Call model.train() "
            f"first. Or torch captured nothing of it{IN_A_LOOP}."
        )
    return steps, taken, plan


def _differences(left: Steps, right: Steps, rounded: frozenset[str] = frozenset()) -> tuple[str, ...]:
    """The names of what is not the same in one of the steps, for some of them up to rounding."""

    def equal(name: str) -> bool:
        compare = _close if name in rounded else _same
        return all(compare(a.get(name), b.get(name)) for a, b in zip(left, right, strict=True))

    names = dict.fromkeys(name for step in (*left, *right) for name in step)
    return tuple(name for name in names if not equal(name))


def _all_close(left: Steps, right: Steps, name: str, dtypes: Sequence[torch.dtype]) -> bool:
    return all(_close(a.get(name), b.get(name), dtypes) for a, b in zip(left, right, strict=True))


def _same(left: torch.Tensor | None, right: torch.Tensor | None) -> bool:
    if left is None or right is None:
        return left is right
    if (left.shape, left.dtype) != (right.shape, right.dtype):
        return False
    flat = [t.contiguous().reshape(-1).view(torch.uint8) for t in (left, right)]
    return torch.equal(*flat)


def _close(left: torch.Tensor | None, right: torch.Tensor | None, dtypes: Sequence[torch.dtype] = ()) -> bool:
    """Whether two tensors agree to half of the digits that their dtype, or the least of some others, has."""
    if left is None or right is None or not left.dtype.is_floating_point or left.dtype != right.dtype:
        return _same(left, right)
    gap, whole = (t.double().norm().item() for t in (left - right, left))
    return bool(gap <= max(torch.finfo(dtype).eps for dtype in (left.dtype, *dtypes)) ** 0.5 * whole)
