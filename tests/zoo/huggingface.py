"""Models of the transformers library at toy sizes, with random weights."""

from typing import Any

import torch
from torch import Tensor, nn

from .case import Built, case, labels

VOCAB, BATCH, TIME, LAYERS = 64, 4, 32, 3


def build(model: str, config: str, **options: Any) -> nn.Module:
    import transformers

    return getattr(transformers, model)(getattr(transformers, config)(**options))


def causal(model: nn.Module) -> Built:
    tokens = labels(BATCH, TIME, classes=VOCAB)
    return model, (), {"input_ids": tokens, "attention_mask": padding(), "labels": tokens, "use_cache": False}


def padding() -> Tensor:
    """A mask that pads some rows."""
    return (torch.arange(TIME) < torch.tensor([TIME, 20, 25, 30])[:, None]).long()


LLAMA = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": TIME,
}


@case("loss_inside", "transformers", "multi_output", "kwargs", "dropout", "random", "tied")
def hf_gpt2() -> Built:
    options = {"vocab_size": VOCAB, "n_positions": TIME, "n_embd": 32, "n_layer": LAYERS, "n_head": 4}
    model = build("GPT2LMHeadModel", "GPT2Config", bos_token_id=0, eos_token_id=0, **options)
    model.loss_type = "ForCausalLM"  # otherwise the loss logs a warning, and the logging breaks the graph
    return causal(model)


@case("loss_inside", "transformers", "multi_output", "kwargs")
def hf_llama() -> Built:
    model, args, kwargs = causal(build("LlamaForCausalLM", "LlamaConfig", **LLAMA))
    return model, args, kwargs | {"attention_mask": torch.ones(BATCH, TIME, dtype=torch.long)}


@case("loss_inside", "transformers", "multi_output", "kwargs", "moe", "races")
def hf_mixtral() -> Built:
    options = LLAMA | {
        "intermediate_size": 32,
        "num_local_experts": 4,
        "experts_implementation": "batched_mm",
    }
    return causal(build("MixtralForCausalLM", "MixtralConfig", **options))


@case("loss_inside", "transformers", "multi_output", "kwargs", "dropout", "random")
def hf_bert() -> Built:
    model = build(
        "BertForSequenceClassification",
        "BertConfig",
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=TIME,
        num_labels=3,
    )
    tokens = labels(BATCH, TIME, classes=VOCAB)
    return model, (tokens,), {"attention_mask": padding(), "labels": labels(BATCH, classes=3)}


@case("loss_inside", "transformers", "multi_output", "kwargs", "dropout", "random", "tied")
def hf_t5() -> Built:
    model = build(
        "T5ForConditionalGeneration",
        "T5Config",
        vocab_size=VOCAB,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
    )
    source, target = labels(BATCH, TIME, classes=VOCAB), labels(BATCH, 24, classes=VOCAB)
    return model, (), {"input_ids": source, "labels": target, "use_cache": False}


@case("loss_inside", "transformers", "multi_output", "kwargs", "conv")
def hf_vit() -> Built:
    model = build(
        "ViTForImageClassification",
        "ViTConfig",
        image_size=24,
        patch_size=4,
        hidden_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        intermediate_size=64,
        num_labels=5,
    )
    return model, (torch.randn(BATCH, 3, 24, 24),), {"labels": labels(BATCH, classes=5)}
