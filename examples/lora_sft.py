"""Supervised fine-tuning of adapters: `trl`'s SFTTrainer and `peft`'s LoRA under a cap, by one callback.

python examples/lora_sft.py

Gradient checkpointing, which trl switches on, is off during the training: the plan chooses what to recompute.
The weights and words are random, so that nothing is downloaded.
"""

import tempfile

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import lowtide

WORDS = [f"word{number}" for number in range(253)] + ["<s>", "</s>", "<pad>"]


def make_tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="word0"))
    special = {"unk_token": "word0", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=words, **special)


def make_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=253,
        eos_token_id=254,
        pad_token_id=255,
    )
    return LlamaForCausalLM(config)


def main() -> None:
    torch.manual_seed(0)
    callback = lowtide.integrations.transformers.Cap("70%")  # or "8GiB"
    with tempfile.TemporaryDirectory() as folder:
        trainer = SFTTrainer(
            model=make_model(),
            args=SFTConfig(
                output_dir=folder,
                per_device_train_batch_size=8,
                max_steps=4,
                logging_steps=1,
                report_to="none",
                disable_tqdm=True,
                use_cpu=not torch.cuda.is_available(),
                dataloader_pin_memory=False,
            ),
            train_dataset=Dataset.from_dict({"input_ids": torch.randint(253, (32, 64)).tolist()}),
            processing_class=make_tokenizer(),
            peft_config=LoraConfig(r=8, target_modules="all-linear"),
            callbacks=[callback],  # the line
        )
        trainer.train()
    plan = callback.plan
    assert plan is not None
    print(f"uncapped, the peak of a step is {plan.uncapped.peak / 2**20:.1f} MiB")
    print(f"capped, {plan.peak / 2**20:.1f} MiB were predicted, for {plan.extra:.1%} more time")
    print(f"and {(callback.measured or 0) / 2**20:.1f} MiB measured")


if __name__ == "__main__":
    main()
