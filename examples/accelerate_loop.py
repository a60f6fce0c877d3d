"""A training loop with `accelerate` under a cap: one line more than without.

python examples/accelerate_loop.py

The line may stand before `prepare` or after it, and take the optimizer as it was or as it was prepared.
"""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

import lowtide


def make_model() -> GPT2LMHeadModel:
    config = GPT2Config(
        vocab_size=256,
        n_positions=64,
        n_embd=64,
        n_layer=2,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
        loss_type="ForCausalLM",
    )
    return GPT2LMHeadModel(config)


def main() -> None:
    torch.manual_seed(0)
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    text = torch.arange(64 * 64).remainder(97).view(64, 64)  # it repeats itself: easy to learn
    loader = DataLoader(TensorDataset(text), batch_size=8)

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    lowtide.cap(model, "60%", optimizer=optimizer)  # the line

    model.train()
    for number, (words,) in enumerate(loader):
        with accelerator.accumulate(model):
            loss = model(input_ids=words, labels=words, use_cache=False).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        print(f"batch {number}: loss {loss.item():.4f}")
    plan = lowtide.plan_of(model)
    assert plan is not None
    print(f"uncapped, the peak of a step is {plan.uncapped.peak / 2**20:.1f} MiB")
    print(f"capped, it is {plan.peak / 2**20:.1f} MiB, for {plan.extra:.1%} more time as predicted")


if __name__ == "__main__":
    main()
