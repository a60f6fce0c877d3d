"""`transformers.Trainer` with and without the callback: the same script, the same weights, bit for bit."""

import json

import pytest
import torch

import lowtide
from lowtide.plans.returning import let_go_of
from small_trainings import (
    DIVIDED_LOSS,
    NUMBERS_OF_THE_TRAINER,
    Texts,
    bert,
    gpt2,
    is_capped,
    llama,
    lora,
    same_weights,
)
from tried import tried

transformers = pytest.importorskip("transformers", reason="transformers is not installed (the extra tools)")
pytest.importorskip("accelerate", reason="accelerate is not installed (the extra tools)")

from lowtide.integrations.transformers import MEASURED, PREDICTED, Cap  # noqa: E402

pytestmark = [
    pytest.mark.slow,  # what is imported here takes seconds
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.cpu.amp.*:FutureWarning"),
]


def arguments(folder, **choices):
    given = {"output_dir": str(folder), "per_device_train_batch_size": 4, "max_steps": 2, "logging_steps": 1}
    quiet = {"use_cpu": True, "disable_tqdm": True, "report_to": [], "save_strategy": "no"}
    return transformers.TrainingArguments(**(given | quiet | choices))


def trained(
    folder, model, *callbacks, data=None, kind=transformers.Trainer, resume=None, collator=None, **choices
):
    """The script of a user: a Trainer, and its training."""
    given = {"train_dataset": data or Texts(), "eval_dataset": Texts(4), "data_collator": collator}
    trainer = kind(model=model, args=arguments(folder, **choices), callbacks=list(callbacks), **given)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def compared(folder, make, budget="80%", *, options=None, numbers=DIVIDED_LOSS, **script):
    """The trainer of a capped training, whose weights are those of the same script without the callback."""
    plain = make()
    trained(folder / "plain", plain, **script)
    callback = Cap(budget, **({"prices": "roofline"} | (options or {})))
    trainer = trained(folder / "capped", make(), callback, **script)
    assert same_weights(trainer.model, plain)
    assert callback.predicted <= callback.plan.budget
    assert callback.measured is None or callback.measured <= callback.predicted + numbers
    assert callback.plan.method != "keep_all"
    assert not is_capped(trainer.model)
    return trainer, callback


@tried("transformers.Trainer", "AdamW, clipping, linear schedule; trained twice; log and report")
@tried("transformers.Trainer", "`gradient_checkpointing=True`, which the callback switches off")
def test_a_training_with_its_log_and_its_report(tmp_path, caplog_lowtide):
    trainer, callback = compared(tmp_path, gpt2, options={"prices": "measured"}, gradient_checkpointing=True)
    assert sum("gradient checkpointing is off" in line for line in caplog_lowtide) == 1
    assert trainer.model.is_gradient_checkpointing
    first, second, last = trainer.state.log_history
    assert first[PREDICTED] == second[PREDICTED] == last[PREDICTED] == callback.plan.peak
    assert let_go_of(callback.plan.graph)  # of the logits, as the Trainer does
    assert MEASURED not in first
    assert second[MEASURED] == last[MEASURED] == callback.measured
    assert 0.9 * callback.predicted < callback.measured
    assert "transformer.h.0.mlp" in (tmp_path / "capped" / "lowtide.html").read_text()
    plain = trained(tmp_path / "plain", gpt2())
    for each in (plain, trainer):
        torch.manual_seed(1)
        each.train()
    assert same_weights(trainer.model, plain.model)
    assert not is_capped(trainer.model)


@tried(
    "transformers.Trainer",
    "`gradient_accumulation_steps`, a smaller last batch, `bf16=True`, `max_grad_norm`",
)
def test_accumulation_in_mixed_precision_with_a_smaller_last_batch(tmp_path):
    script = {"data": Texts(5), "gradient_accumulation_steps": 2, "max_grad_norm": 0.1, "bf16": True}
    compared(tmp_path, gpt2, **script)


@tried("transformers.Trainer", "`eval_steps`, `save_steps`, `resume_from_checkpoint`")
def test_evaluation_checkpoints_and_resuming(tmp_path):
    choices = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 2}
    plain = gpt2()
    trained(tmp_path / "plain", plain, max_steps=3, **choices)
    trained(tmp_path / "capped", gpt2(), Cap("80%"), max_steps=3, **choices)
    saved = [tmp_path / name / "checkpoint-2" for name in ("plain", "capped")]
    ones, others = (transformers.GPT2LMHeadModel.from_pretrained(folder) for folder in saved)
    assert same_weights(ones, others)
    resumed = trained(tmp_path / "capped", gpt2(), Cap("80%"), resume=str(saved[1]), max_steps=3, **choices)
    assert same_weights(resumed.model, plain)
    lines = [line for line in resumed.state.log_history if "eval_loss" in line]
    assert lines
    assert not any(PREDICTED in line for line in lines)
    json.dumps(resumed.state.log_history)


@tried("transformers.Trainer", "`label_smoothing_factor`: the loss outside of the model")
def test_label_smoothing(tmp_path):
    compared(tmp_path, gpt2, label_smoothing_factor=0.1)


class OwnLoss(transformers.Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **others):
        outputs = model(**inputs)
        logits, labels = outputs.logits[:, :-1], inputs["labels"][:, 1:]
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=3)


@tried("transformers.Trainer", '`compute_loss` of one\'s own, with `differentiate="all"`')
def test_a_loss_of_ones_own(tmp_path):
    compared(tmp_path, gpt2, kind=OwnLoss, options={"differentiate": "all"})


def padded(items):
    longest = max(len(item["input_ids"]) for item in items)
    fill = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    pad = torch.nn.functional.pad
    return {
        name: torch.stack([pad(item[name], (0, longest - len(item[name])), value=value) for item in items])
        for name, value in fill.items()
    }


@tried("transformers.Trainer", "lengths that vary, padded: a plan for each")
def test_lengths_that_vary(tmp_path, caplog_lowtide):
    data = Texts(8, lengths=(16, 16, 16, 16, 32, 32, 32, 32), mask=True)
    script = {"data": data, "collator": padded, "train_sampling_strategy": "sequential"}
    compared(tmp_path, gpt2, "820KiB", **script)


@tried("transformers.Trainer", "a classifier, whose `problem_type` is settled before the capture")
def test_a_classifier_is_planned_once(tmp_path, caplog_lowtide):
    trainer, _ = compared(tmp_path, bert, "90%", data=Texts(8, classes=3))
    assert trainer.model.config.problem_type == "single_label_classification"
    assert sum(line.startswith("planned") for line in caplog_lowtide) == 1


@tried("transformers.Trainer", "Llama with an `attention_mask`")
def test_llama_with_a_mask(tmp_path):
    compared(tmp_path, llama, "85%")


@tried("PEFT", "LoRA with `gradient_checkpointing=True`, in `transformers.Trainer`")
def test_lora_with_gradient_checkpointing(tmp_path):
    def make():
        return lora(gpt2(), fan_in_fan_out=True)

    trainer, _ = compared(tmp_path, make, gradient_checkpointing=True)
    hooks = [hook.__name__ for part in trainer.model.modules() for hook in part._forward_hooks.values()]
    assert "make_inputs_require_grads" in hooks


def test_a_budget_too_small_is_told_and_leaves_the_model_as_it_was(tmp_path):
    model = gpt2()
    with pytest.raises(lowtide.BudgetTooSmall, match=r"budget 100KiB .* Try budget="):
        trained(tmp_path, model, Cap("100KiB"), gradient_checkpointing=True)
    assert same_weights(model, gpt2())
    assert not is_capped(model)
    assert model.is_gradient_checkpointing


class RunsOutOnce(transformers.Trainer):
    def training_step(self, *arguments, **named):
        if self._train_batch_size > 2:
            raise RuntimeError("CUDA out of memory.")
        return super().training_step(*arguments, **named)


@tried("transformers.Trainer", "`auto_find_batch_size`: capped anew for the smaller batch")
def test_another_batch_size_is_capped_anew(tmp_path):
    trainer, _ = compared(tmp_path, gpt2, "95%", kind=RunsOutOnce, auto_find_batch_size=True)
    assert trainer._train_batch_size == 2


@pytest.mark.parametrize(
    ("choices", "told"),
    [
        ({"torch_compile": True}, 'torch_compile=True .* Cap\\(..., executor="inductor"\\)'),
        ({"n_gpu": 2}, "2 GPUs .*DataParallel.*torchrun"),
        ({"deepspeed": {"stage": 3}}, "DeepSpeed"),
        ({"activation_offloading": True}, "activation_offloading=True"),
    ],
)
def test_what_cannot_be_capped_is_refused_before_the_first_step(choices, told):
    class Arguments:
        n_gpu = 1

    args = Arguments()
    vars(args).update(choices)
    model = torch.nn.Linear(2, 2)
    with pytest.raises(lowtide.LowtideError, match=told):
        Cap("1MiB").on_train_begin(args, None, None, model=model, optimizer=None)
    assert not is_capped(model)


def test_a_callback_needs_a_budget_that_can_be_read():
    with pytest.raises(lowtide.LowtideError, match="Cap needs a budget"):
        Cap()
    with pytest.raises(lowtide.BudgetError, match="apples"):
        Cap("8 apples")
    with pytest.raises(lowtide.LowtideError, match="'colour' is not known"):
        Cap("8GiB", colour="red")


@pytest.mark.slow
@tried(
    "transformers.Trainer",
    "`step_in_backward=True`, with `max_grad_norm=0`, weight decay in groups, a schedule",
)
def test_an_optimizer_that_steps_inside_of_the_backward(tmp_path):
    script = {"max_grad_norm": 0, "weight_decay": 0.1, "warmup_steps": 1}
    options = {"step_in_backward": True}
    trainer, callback = compared(tmp_path, gpt2, options=options, numbers=NUMBERS_OF_THE_TRAINER, **script)
    assert callback.plan.gradient_bytes == 0
    assert all(parameter.grad is None for parameter in trainer.model.parameters())


@pytest.mark.parametrize(
    ("choices", "said"),
    [
        ({}, r"clips gradients .*max_grad_norm=1; its default is 1.0"),
        ({"max_grad_norm": 0, "gradient_accumulation_steps": 2}, "accumulated over 2 batches"),
    ],
)
def test_what_needs_all_gradients_is_refused_before_training(tmp_path, choices, said):
    with pytest.raises(lowtide.LowtideError, match=rf"step_in_backward=True cannot be used here: .*{said}"):
        trained(tmp_path, gpt2(), Cap("80%", step_in_backward=True), **choices)
