"""A cap on what Lightning trains, as one callback: `lightning.Trainer(callbacks=[Cap("8GiB")])`.

Lightning calls `training_step`, not the module, so that is what is captured: forward, loss and all. What it
logs and the metrics that it updates are left out of the graph and done afterwards, with the same values. A
step that cannot be captured whole has its network capped instead, with a line that says so, or is refused.

Lightning zeroes gradients after the forward, so that those of the step before lie beside the activations.
Here it is done before the forward, unless somebody looks at them in between.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..console.log import log
from ..errors import LowtideError
from ..measuring.meter import Measurement, Meter
from ..options import Options
from ..pipeline.optimizer_steps import present_state
from ..plans.planned_step import Plan
from ..report import page as _page  # noqa: F401  # it lets plans write reports
from ..units import Budget, format_bytes
from .training_step import TrainingStep

__all__ = ["Cap"]

_OLD_NAME = "pytorch_lightning"
_home = _OLD_NAME if _OLD_NAME in sys.modules and "lightning" not in sys.modules else "lightning.pytorch"
Callback: Any = importlib.import_module(_home).Callback

STRATEGIES = ("SingleDeviceStrategy", "DDPStrategy")
"""The strategies of Lightning under which every process holds the whole model."""

PREDICTED, MEASURED_PEAK = "lowtide/predicted_peak", "lowtide/measured_peak"

MEASURED = 2
"""Steps that are measured after a new plan; the first of them may still meet other gradients or states."""


class Cap(Callback):  # type: ignore[misc]
    """Caps the peak memory of what Lightning's Trainer trains; the options are those of `lowtide.cap`.

    `module` names the part of the LightningModule to cap, where its whole `training_step` is not to be.
    `report` says whether to write the plan as `lowtide.html` beside the logs. The trainer's optimizers are
    counted. `plan` is the plan of the last step; `measured` is the peak of the last one that was measured,
    and `measured_plan` the plan of that.
    """

    def __init__(
        self,
        budget: int | str | Budget | None = None,
        *,
        module: str | None = None,
        report: bool = True,
        **options: Any,
    ) -> None:
        self.options = Options.make(budget, **options)
        if self.options.budget is None and self.options.plan is None:
            raise LowtideError('Cap needs a budget, as in Cap("8GiB"), or a plan=')
        self.part = module
        self.writes_report = report
        self.measured: int | None = None
        self.measured_plan: Plan | None = None
        self.last_plan: Plan | None = None
        self.step: TrainingStep | None = None
        self.counted: list[Any] = []
        self.meter = Meter()
        self.to_measure = 0
        self.folder = Path()

    @property
    def plan(self) -> Plan | None:
        """The plan of the last training step; None before the first one."""
        return self.last_plan if self.step is None else self.step.plan

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Cap the step: its optimizers are there now."""
        _refuse(trainer, pl_module)
        if self.options.step_in_backward:
            _refuse_what_needs_all_gradients(trainer)
        self.counted = list(trainer.optimizers)
        counted = self.options.optimizer or self.counted or None
        self.step = TrainingStep(pl_module, replace(self.options, optimizer=counted), part=self.part)
        self.folder = Path(trainer.log_dir or trainer.default_root_dir)  # asked of every process
        self.to_measure = 0
        vars(trainer.strategy)["training_step"] = self.through_the_cap(trainer)

    def through_the_cap(self, trainer: Any) -> Any:
        """What stands for the strategy's own `training_step`, which enters autocast and DDP."""
        strategy, module, step = trainer.strategy, trainer.lightning_module, self.step
        assert step is not None

        def training_step(*args: Any, **kwargs: Any) -> Any:
            _zero_early(trainer, module)
            self.begin_measuring(trainer, step)
            before = step.captured
            with _in_place_of(module, "training_step", step):
                output = type(strategy).training_step(strategy, *args, **kwargs)
            if step.captured > before:
                self.meter.end()  # the capture was in it
                self.to_measure = MEASURED
            return output

        return training_step

    def begin_measuring(self, trainer: Any, step: TrainingStep) -> None:
        if not self.to_measure or step.plan is None:
            return
        self.to_measure -= 1
        state = present_state(step.options.optimizer, step.module.parameters())
        self.meter.begin(torch.device(step.plan.graph.device), state)

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        """Tell the peak of the step, where it was measured."""
        taken, plan = self.meter.end(), self.plan
        if taken is None or plan is None:
            return
        self.measured, self.measured_plan = taken.peak, plan
        if trainer.is_global_zero and not trainer.fast_dev_run:
            found = {PREDICTED: plan.allocated, MEASURED_PEAK: taken.peak}
            for logger in trainer.loggers:
                logger.log_metrics(found, step=trainer.global_step)
            self.write_report(plan, taken)

    def write_report(self, plan: Plan, measured: Measurement) -> None:
        if self.writes_report:
            self.folder.mkdir(parents=True, exist_ok=True)
            plan.report(self.folder / "lowtide.html", measured=measured)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Take the cap away, as training is over."""
        if self.measured is not None and self.measured_plan is not None:
            planned = format_bytes(self.measured_plan.allocated)
            log.info("measured: peak %s, planned %s", format_bytes(self.measured), planned)
        self.remove(trainer)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Take the cap away."""
        self.remove(trainer)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Take the cap away, if it is still there."""
        self.remove(trainer)

    def remove(self, trainer: Any) -> None:
        """Let everything be as before; only the plan is kept, and nothing that holds the optimizers."""
        self.meter.end()
        if self.step is None:
            return
        self.last_plan, step, self.step = self.step.plan, self.step, None
        vars(trainer.strategy).pop("training_step", None)
        step.remove()
        self.counted.clear()  # torch keeps what it compiled for a while, and that these options


def _refuse(trainer: Any, module: Any) -> None:
    kinds = [kind.__name__ for kind in type(trainer.strategy).__mro__]
    if not set(STRATEGIES) & set(kinds):
        raise LowtideError(
            f"{kinds[0]} shards or moves what a plan counts; Cap takes trainers on one device, or with "
            'strategy="ddp"'
        )
    if "training_step" in vars(module):
        raise LowtideError(
            "something else is in the place of this module's training_step, as torch.compile(module) puts "
            "it there; hand the module itself to the Trainer, and "
            'Cap(..., executor="inductor") for fused kernels'
        )


def _refuse_what_needs_all_gradients(trainer: Any) -> None:
    """Refuse what looks at gradients after the backward: the optimizer has used them up inside of it."""
    for refused, told in (
        (
            trainer.gradient_clip_val,
            f"the Trainer clips gradients (gradient_clip_val={trainer.gradient_clip_val}). Leave that out",
        ),
        (
            trainer.accumulate_grad_batches > 1,
            f"gradients are accumulated over {trainer.accumulate_grad_batches} batches "
            "(accumulate_grad_batches). A larger batch under the budget takes their place",
        ),
        (
            getattr(trainer.precision_plugin, "scaler", None) is not None,
            f"precision={trainer.precision!r} scales the loss (GradScaler). bf16-mixed needs no scaler",
        ),
    ):
        if refused:
            raise LowtideError(f"step_in_backward=True cannot be used here: {told}")


@contextmanager
def _in_place_of(module: Any, name: str, function: Any) -> Iterator[None]:
    """Let a method of a module be another function for a while."""
    before = vars(module).get(name)
    vars(module)[name] = function
    try:
        yield
    finally:
        if before is None:
            del vars(module)[name]
        else:
            vars(module)[name] = before


def _zero_early(trainer: Any, module: Any) -> None:
    """Zero the gradients that Lightning would zero between this step's forward and its backward."""
    loop = trainer.fit_loop.epoch_loop
    # stochastic weight averaging lets a last epoch run without a backward (seen in Lightning 2.6)
    if not module.automatic_optimization or vars(loop.automatic_optimization).get("_skip_backward"):
        return
    if loop.batch_idx % trainer.accumulate_grad_batches == 0 and not _is_looked_at(trainer, module):
        trainer.optimizers[0].zero_grad()


def _is_looked_at(trainer: Any, module: Any) -> bool:
    """Whether a hook may see the gradients before they are zeroed, or zeroes them in its own way."""
    bases = {"LightningModule", "Callback", "ModelHooks"}
    return (
        _has_own(module, "optimizer_zero_grad", bases)
        or _has_own(module, "on_before_zero_grad", bases)
        or any(_has_own(each, "on_before_zero_grad", bases) for each in trainer.callbacks)
    )


def _has_own(owner: Any, method: str, bases: set[str]) -> bool:
    home = next(kind for kind in type(owner).__mro__ if method in vars(kind))
    return home.__name__ not in bases or method in vars(owner)
