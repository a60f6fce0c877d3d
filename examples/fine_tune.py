"""Fine-tune a model of `transformers` under a cap: one line more than without.

python examples/fine_tune.py

The weights are random ones from a config, so that nothing is downloaded; with a checkpoint of your own, write
`AutoModelForSequenceClassification.from_pretrained(...).train()` instead: it comes in eval mode.
"""

import torch
from transformers import BertConfig, BertForSequenceClassification

import lowtide


def make_model() -> BertForSequenceClassification:
    config = BertConfig(
        vocab_size=1000,
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=256,
        num_labels=2,
        problem_type="single_label_classification",
    )
    return BertForSequenceClassification(config)


def make_batch(rows: int = 16, length: int = 64) -> dict[str, torch.Tensor]:
    """Sentences of random words; those with word 7 near the start are of class 1."""
    ids = torch.randint(10, 1000, (rows, length))
    labels = torch.randint(2, (rows,))
    ids[labels == 1, 3] = 7
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def main() -> None:
    torch.manual_seed(0)
    model, batch = make_model(), make_batch()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    uncapped = lowtide.plan(model, kwargs=batch, optimizer=optimizer)
    print(f"uncapped, the peak of a step is {uncapped.peak / 2**20:.1f} MiB")

    lowtide.cap(model, "60%", optimizer=optimizer)  # the line

    for step in range(6):
        loss = model(**make_batch()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}")
    plan = lowtide.plan_of(model)
    assert plan is not None
    print(f"capped, it is {plan.peak / 2**20:.1f} MiB, for {plan.extra:.1%} more time as predicted")


if __name__ == "__main__":
    main()
