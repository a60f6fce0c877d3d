"""trl's `SFTTrainer` with and without the callback: its default loss, adapters, and its default arguments."""

import pytest
import torch

from small_trainings import DIVIDED_LOSS, gpt2, is_capped, llama, lora, same_weights
from tried import tried

trl = pytest.importorskip("trl", reason="trl is not installed (the extra tools)")
pytest.importorskip("peft", reason="peft is not installed (the extra tools)")

import datasets  # noqa: E402

from lowtide.integrations.fused_head import capturable_head  # noqa: E402
from lowtide.integrations.transformers import Cap  # noqa: E402

pytestmark = pytest.mark.slow


def texts():
    draw = torch.Generator().manual_seed(5)
    rows = torch.randint(3, 32, (8, 24), generator=draw).tolist()
    masks = [[int(place >= 8) for place in range(24)] for _ in rows]
    return datasets.Dataset.from_dict({"input_ids": rows, "completion_mask": masks})


def tokenizer():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(29)} | {"<s>": 29, "</s>": 30, "<pad>": 31}
    made = Tokenizer(models.WordLevel(words, unk_token="w3"))
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="w3"
    )


def trained(folder, model, *callbacks, **choices):
    """The script of a user, with the defaults of trl."""
    given = {"output_dir": str(folder), "per_device_train_batch_size": 4, "max_steps": 2, "logging_steps": 1}
    quiet = {"use_cpu": True, "disable_tqdm": True, "report_to": [], "save_strategy": "no"}
    trainer = trl.SFTTrainer(
        model=model,
        args=trl.SFTConfig(**(given | quiet | choices)),
        train_dataset=texts(),
        processing_class=tokenizer(),
        callbacks=list(callbacks),
    )
    trainer.train()
    return trainer


def compared(folder, make, budget, **choices):
    plain = trained(folder / "plain", make(), **choices).model
    callback = Cap(budget)
    model = trained(folder / "capped", make(), callback, **choices).model
    assert same_weights(model, plain)
    assert callback.measured <= callback.predicted + DIVIDED_LOSS
    assert callback.predicted <= callback.plan.budget
    assert callback.plan.method != "keep_all"
    assert not is_capped(model)


@tried("trl.SFTTrainer", "its fused loss, with its defaults: bf16, gradient checkpointing")
def test_the_fused_loss_with_the_defaults(tmp_path):
    compared(tmp_path, gpt2, "90%")


@tried("trl.SFTTrainer", 'Llama with LoRA, `loss_type="dft"`')
def test_lora_with_another_loss(tmp_path):
    compared(tmp_path, lambda: lora(llama()), "90%", loss_type="dft", bf16=False)


def test_the_fused_head_is_trls_own_afterwards():
    from trl.kernels import chunked_logprob
    from trl.trainer import utils

    before = utils._ChunkedLogProbFunction, utils._use_triton, chunked_logprob._use_triton
    with capturable_head():
        assert utils._ChunkedLogProbFunction is not before[0]
        assert utils._use_triton("cuda") is False
    assert (utils._ChunkedLogProbFunction, utils._use_triton, chunked_logprob._use_triton) == before
