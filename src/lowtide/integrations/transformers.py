"""A callback that caps the training steps of `transformers.Trainer`, and of trainers that are made of it.

    trainer = Trainer(..., callbacks=[lowtide.integrations.transformers.Cap("8GiB")])

The model is capped when the training begins, with the optimizer that the trainer has made by then, and as it
was before when the training ends.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError(
        "lowtide.integrations.transformers needs transformers and accelerate: "
        'pip install "transformers[torch]"'
    ) from error

import torch

from ..console.log import log
from ..entry.api import cap, plan_of, uncap
from ..entry.in_place import capped_of
from ..entry.wrappers import called_by
from ..errors import LowtideError
from ..measuring.meter import Measurement, Meter
from ..options import Options
from ..pipeline.optimizer_steps import present_state
from ..plans.planned_step import Plan
from ..plans.returning import same_step
from ..report import page as page  # fills the port of `plan.report`
from ..units import Budget
from .checkpointing import without_checkpointing
from .fused_head import capturable_head, has_fused_head

__all__ = ["Cap"]

REPORT = "lowtide.html"
PREDICTED, MEASURED = "lowtide/predicted_peak", "lowtide/measured_peak"


class Cap(TrainerCallback):
    """Keeps the training steps of a `transformers.Trainer` under a budget.

    The budget and the options are those of `lowtide.cap`; the optimizer is the trainer's. The Trainer's log
    gets `lowtide/predicted_peak` and `lowtide/measured_peak` in bytes, its `output_dir` the report of the
    plan; `measure=False` and `report=False` leave these out.

    After the training, `plan` is the largest plan, `predicted` and `measured` are the two peaks.
    """

    def __init__(
        self,
        budget: int | str | Budget | None = None,
        *,
        measure: bool = True,
        report: bool = True,
        **options: Any,
    ) -> None:
        if Options.make(budget, **options).budget is None and options.get("plan") is None:
            raise LowtideError('Cap needs a budget, as in Cap("8GiB"), or a plan=')
        self.budget = budget
        self.options = options
        self.measure = measure
        self.report = report
        self.model: torch.nn.Module | None = None
        self.undo = ExitStack()
        self.meter = Meter()
        self._forget()

    def _forget(self) -> None:
        """Start without figures."""
        self.plan: Plan | None = None
        self.measured: int | None = None
        self.measuring = False
        self.resident: Any = None
        self.device = torch.device("cpu")
        self.of_measured = 0
        self.reported: Plan | None = None

    @property
    def predicted(self) -> int | None:
        """The peak of the largest plan so far, in bytes, as it was last made."""
        return None if self.plan is None else self.plan.allocated

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Cap the model: it is on its device now, and has its optimizer."""
        self._release()  # of a training that ended with an error, or begins anew with another batch size
        _refuse_what_cannot_be_capped(args)
        if self.options.get("step_in_backward"):
            _refuse_what_needs_all_gradients(args)
        self._forget()
        model = called_by(given["model"])
        options = {"optimizer": given["optimizer"], **self.options}
        if has_fused_head(args):
            options.setdefault("differentiate", "all")  # its loss is made of the head's log-probabilities
        with ExitStack() as undo:
            if undo.enter_context(without_checkpointing(model)):
                log.info(
                    "gradient checkpointing is off during this training: the plan says what to recompute"
                )
            undo.enter_context(capturable_head())
            cap(model, self.budget, **options)
            capped = capped_of(model)
            assert capped is not None
            capped.when_refused = self._release  # the Trainer tells no callback of an error
            capped.caller.holds.expected_to_let_go = True  # its `compute_loss` returns the loss alone
            self.undo = undo.pop_all()
        self.model, self.device = model, next(iter(model.parameters())).device
        self.resident = lambda: present_state(options["optimizer"], model.parameters())

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Measure the step, where the plan in force is larger than those that were measured."""
        plan = self._present_plan()
        if self.measure and plan is not None and plan.allocated > self.of_measured:
            self.measuring = True
            self._measure()

    def on_substep_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Note what a batch took after which the optimizer does not step; a plan is for one batch."""
        self._note_step()
        if self.measuring:
            self._measure()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Note what the step took; the optimizer's own step is no part of a plan."""
        self._note_step()
        if self.measuring:
            self.measuring, self.of_measured = False, self.predicted or 0

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Write the report as soon as there is a plan: a training may be interrupted."""
        if self.reported is None:
            self._write_report(args, state)

    def on_log(self, args: Any, state: Any, control: Any, *, logs: Any = None, **others: Any) -> None:
        """Add both peaks to a line of the training, and to the trainer's history."""
        if logs is None or not {"loss", "train_runtime"} & set(logs):
            return
        figures = {PREDICTED: self.predicted, MEASURED: self.measured}
        for line in (logs, *state.log_history[-1:]):
            line.update({name: value for name, value in figures.items() if value is not None})

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Leave the model as it was before the training, but for what it has learnt."""
        if self.plan is not self.reported or self.measured is not None:
            self._write_report(args, state)
        self._release()

    def _measure(self) -> None:
        self.meter.begin(self.device, self.resident())

    def _present_plan(self) -> Plan | None:
        return None if self.model is None else plan_of(self.model)

    def _note_step(self) -> None:
        plan = self._present_plan()
        if plan is not None and (self.plan is None or _takes_over(plan, self.plan)):
            self.plan = plan
        if (taken := self.meter.end()) is not None:
            self.measured = max(taken.peak, self.measured or 0)

    def _write_report(self, args: Any, state: Any) -> None:
        if self.plan is None or not self.report or not state.is_world_process_zero:
            return
        folder = Path(args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        measured = None if self.measured is None else Measurement(self.measured, 0.0)
        self.plan.report(folder / REPORT, measured=measured)
        self.reported = self.plan

    def _release(self) -> None:
        self.meter.end()
        self.measuring = False
        if self.model is not None and capped_of(self.model) is not None:
            uncap(self.model)
        self.model = self.resident = None
        self.undo.close()


def _takes_over(plan: Plan, known: Plan) -> bool:
    """Whether a plan is larger than the one that is known, or of the same step, which was planned again."""
    again = plan is not known and same_step(plan.graph, known.graph)
    return plan.allocated > known.allocated or again


def _refuse_what_cannot_be_capped(args: Any) -> None:
    for refused, told in (
        (
            getattr(args, "torch_compile", False),
            "torch_compile=True compiles the model, and a cap captures it: take one of them. "
            'Cap(..., executor="inductor") gives the fused kernels of torch.compile under the cap',
        ),
        (
            getattr(args, "n_gpu", 1) > 1,
            f"the Trainer sees {getattr(args, 'n_gpu', 1)} GPUs and puts the model into "
            "torch.nn.DataParallel, whose copies cannot be capped. Start one process for each GPU (torchrun, "
            "accelerate launch), or let it see one (CUDA_VISIBLE_DEVICES=0)",
        ),
        (
            getattr(args, "deepspeed", None),
            "DeepSpeed keeps parameters, gradients and optimizer state where no plan sees them: it cannot be "
            "capped. Take DistributedDataParallel, or leave the callback out",
        ),
        (
            getattr(args, "activation_offloading", False),
            "activation_offloading=True moves what the step saves to the host, and a plan counts it on the "
            "device: take one of them",
        ),
    ):
        if refused:
            raise LowtideError(told)


def _refuse_what_needs_all_gradients(args: Any) -> None:
    """Refuse what looks at gradients after the backward: the optimizer has used them up inside of it."""
    norm, batches = getattr(args, "max_grad_norm", 0) or 0, getattr(args, "gradient_accumulation_steps", 1)
    for refused, told in (
        (
            norm > 0,
            f"the Trainer clips gradients by the norm of all of them (max_grad_norm={norm:g}; its default is "
            "1.0). TrainingArguments(max_grad_norm=0) leaves that out",
        ),
        (
            batches > 1,
            f"gradients are accumulated over {batches} batches. A larger per_device_train_batch_size under "
            "the budget takes their place",
        ),
        (
            getattr(args, "fp16", False),
            "fp16=True scales the loss and looks at all gradients before it steps (GradScaler). bf16=True "
            "needs no scaler",
        ),
    ):
        if refused:
            raise LowtideError(f"step_in_backward=True cannot be used here: {told}")
