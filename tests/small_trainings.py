"""Small models, texts and scripts for the tests on training tools: what a user would write, in seconds."""

from __future__ import annotations

import torch
from torch.utils.data import Dataset

WORDS = 32

DIVIDED_LOSS = 2 * 4
"""Bytes of the loop itself: accelerate divides the loss, which makes a number, and a gradient of it."""

NUMBERS_OF_THE_TRAINER = DIVIDED_LOSS + 2 * 4
"""Besides, it adds the loss to a running one, and takes a norm of no gradients where none are left."""


class Texts(Dataset):
    """Random words, all to be predicted, or a class for each text; of one length or of several."""

    def __init__(self, rows=8, lengths=(32,), classes=0, mask=True):
        draw = torch.Generator().manual_seed(5)
        sizes = [lengths[row % len(lengths)] for row in range(rows)]
        self.words = [torch.randint(3, WORDS, (size,), generator=draw) for size in sizes]
        self.classes = classes
        self.mask = mask

    def __len__(self):
        return len(self.words)

    def __getitem__(self, row):
        words = self.words[row]
        item = {"input_ids": words, "labels": torch.tensor(row % self.classes) if self.classes else words}
        return item | ({"attention_mask": torch.ones_like(words)} if self.mask else {})


def gpt2(**choices):
    """A causal model whose captured step is plain eager's, bit for bit."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    shape = {"vocab_size": WORDS, "n_positions": 32, "n_embd": 32, "n_layer": 1, "n_head": 2}
    words = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(**shape, **words, **choices))
    model.loss_type = "ForCausalLM"  # else transformers warns that it takes this one
    return model


def llama(**choices):
    """A causal model of the kind that trl is used with."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32}
    words = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    return LlamaForCausalLM(LlamaConfig(**shape, **heads, **words, **choices))


def bert(**choices):
    """A classifier that infers the kind of its problem from its labels."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    shape = {"vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "max_position_embeddings": 32}
    return BertForSequenceClassification(BertConfig(**shape, **heads, **({"num_labels": 3} | choices)))


def lora(model, **choices):
    """The same with adapters that alone are trained."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    config = LoraConfig(r=4, task_type="CAUSAL_LM", target_modules="all-linear", **choices)
    return get_peft_model(model, config)


def same_weights(one, other):
    """Whether two models have the same weights under the same names, bit for bit."""
    ones, others = one.state_dict(), other.state_dict()
    return list(ones) == list(others) and all(torch.equal(ones[name], others[name]) for name in ones)


def is_capped(model):
    return any(
        part._compiled_call_impl is not None or "__lowtide__" in vars(part) for part in model.modules()
    )
