"""Train with the Trainer of `transformers` under a cap: one callback more than without.

python examples/trainer.py

The weights are random ones from a config, so that nothing is downloaded.
"""

import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import lowtide


def make_model() -> BertForSequenceClassification:
    config = BertConfig(
        vocab_size=1000,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=256,
        num_labels=2,
    )
    return BertForSequenceClassification(config)


def make_texts(rows: int) -> list[dict[str, torch.Tensor]]:
    """Sentences of random words; those with word 7 near the start are of class 1."""
    texts = []
    for row in range(rows):
        words = torch.randint(10, 1000, (64,))
        if row % 2:
            words[3] = 7
        texts.append({"input_ids": words, "attention_mask": torch.ones(64), "labels": torch.tensor(row % 2)})
    return texts


def main() -> None:
    torch.manual_seed(0)
    callback = lowtide.integrations.transformers.Cap("60%")  # or "8GiB"
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=make_model(),
            args=TrainingArguments(
                output_dir=folder,
                per_device_train_batch_size=16,
                num_train_epochs=2,
                learning_rate=1e-3,
                logging_steps=1,
                eval_strategy="epoch",
                report_to="none",
                disable_tqdm=True,
                dataloader_pin_memory=False,
            ),
            train_dataset=make_texts(40),  # the last batch of an epoch is a smaller one
            eval_dataset=make_texts(16),
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
