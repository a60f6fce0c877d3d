"""Models of the library `transformers`, made from their configs at toy sizes, with random weights and data.

What a config calls its width, its depth and its heads differs from model to model: `TINY` has a small number
for each of these names, and a config is given those that it knows. Nothing else is changed: rates of dropout
and of dropped layers, the kinds of attention and of experts are the library's defaults.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["entries"]

VOCABULARY, BATCH, LENGTH = 64, 2, 16
WIDTH, HEADS, LAYERS, IMAGE = 32, 4, 2, 32

TINY: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "n_vocab", "vocabulary_size"), VOCABULARY),
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "dim", "n_embed", "embedding_size", "word_embed_proj_dim"), WIDTH
    ),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers"), LAYERS),
    **dict.fromkeys(("decoder_layers", "num_decoder_layers", "num_encoder_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_head", "n_heads"), HEADS),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), HEADS),
    **dict.fromkeys(("num_key_value_heads", "n_groups"), 2),
    **dict.fromkeys(
        ("intermediate_size", "d_ff", "d_inner", "encoder_ffn_dim", "decoder_ffn_dim"), 2 * WIDTH
    ),
    **dict.fromkeys(("ffn_dim", "hidden_dim", "n_inner", "d_inner"), 2 * WIDTH),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 4 * LENGTH),
    **dict.fromkeys(("head_dim", "d_kv", "d_head", "rotary_dim"), WIDTH // HEADS),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), WIDTH),
    **dict.fromkeys(("pad_token_id", "bos_token_id"), 0),
    **dict.fromkeys(("eos_token_id", "decoder_start_token_id"), 1),
    "image_size": IMAGE,
    "patch_size": 8,
    "sliding_window": 8,
    "type_vocab_size": 2,
}


def config(kind: str, **changed: Any) -> Any:
    """The config of a kind of model, with the small numbers whose names it knows."""
    from transformers import CONFIG_MAPPING

    made = CONFIG_MAPPING[kind]
    fields = inspect.signature(made).parameters
    several = {name for name, field in fields.items() if isinstance(field.default, list | tuple)}
    known = {*fields, *made.attribute_map} - several
    tiny = {name: value for name, value in TINY.items() if name in known}
    taken = {made.attribute_map.get(name) for name in tiny} | several
    tiny = {name: value for name, value in tiny.items() if made.attribute_map.get(name, "") not in taken}
    return made(**tiny | {"num_labels": 3, **changed})


def tokens(*shape: int) -> Tensor:
    return torch.randint(2, VOCABULARY, shape)


def padding() -> Tensor:
    """A mask that pads one of two rows."""
    return (torch.arange(LENGTH) < torch.tensor([LENGTH, LENGTH - 5])[:, None]).long()


Built = tuple[nn.Module, dict[str, Any]]
Build = Callable[[], Built]


def _auto(head: str, kind: str, batch: Callable[[Any], dict[str, Any]], changed: dict[str, Any]) -> Build:
    def build() -> Built:
        import transformers

        small = config(kind, **changed)
        return getattr(transformers, f"AutoModelFor{head}").from_config(small), batch(small)

    return build


def causal(kind: str, **changed: Any) -> Build:
    def batch(small: Any) -> dict[str, Any]:
        ids = tokens(BATCH, LENGTH)
        return {"input_ids": ids, "attention_mask": padding(), "labels": ids, "use_cache": False}

    return _auto("CausalLM", kind, batch, changed)


def masked(kind: str, **changed: Any) -> Build:
    def batch(small: Any) -> dict[str, Any]:
        ids = tokens(BATCH, LENGTH)
        return {"input_ids": ids, "attention_mask": padding(), "labels": ids}

    return _auto("MaskedLM", kind, batch, changed)


def seq2seq(kind: str, **changed: Any) -> Build:
    def batch(small: Any) -> dict[str, Any]:
        return {
            "input_ids": tokens(BATCH, LENGTH),
            "attention_mask": padding(),
            "labels": tokens(BATCH, LENGTH),
            "use_cache": False,
        }

    return _auto("Seq2SeqLM", kind, batch, changed)


def image(kind: str, **changed: Any) -> Build:
    def batch(small: Any) -> dict[str, Any]:
        return {
            "pixel_values": torch.randn(BATCH, 3, *changed.get("image_size", [IMAGE, IMAGE])),
            "labels": torch.tensor([0, 2]),
        }

    return _auto("ImageClassification", kind, batch, changed)


def segmentation(kind: str, **changed: Any) -> Build:
    def batch(small: Any) -> dict[str, Any]:
        labels = torch.randint(3, (BATCH, 64, 64))
        return {"pixel_values": torch.randn(BATCH, 3, 64, 64), "labels": labels}

    return _auto("SemanticSegmentation", kind, batch, changed)


def detection(kind: str, **changed: Any) -> Build:
    def batch(small: Any) -> dict[str, Any]:
        boxes = torch.tensor([[0.5, 0.5, 0.2, 0.3], [0.3, 0.4, 0.2, 0.2]])
        labels = [{"class_labels": torch.tensor([0, 2]), "boxes": boxes} for _ in range(BATCH)]
        return {"pixel_values": torch.randn(BATCH, 3, 64, 64), "labels": labels}

    return _auto("ObjectDetection", kind, batch, changed)


SPEECH = {
    "conv_dim": (16, 16),
    "conv_kernel": (4, 3),
    "conv_stride": (4, 3),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "mask_time_prob": 0.0,
}


def ctc(kind: str, **changed: Any) -> Build:
    def batch(small: Any) -> dict[str, Any]:
        return {"input_values": torch.randn(BATCH, 400), "labels": tokens(BATCH, 5)}

    return _auto("CTC", kind, batch, SPEECH | changed)


def audio(kind: str, **changed: Any) -> Build:
    def batch(small: Any) -> dict[str, Any]:
        return {"input_values": torch.randn(BATCH, 400), "labels": torch.tensor([0, 1])}

    return _auto("AudioClassification", kind, batch, SPEECH | {"classifier_proj_size": 16} | changed)


def named(model: str, kind: str, batch: Callable[[], dict[str, Any]], **changed: Any) -> Build:
    """A model by its class, for tasks that the library has no table of."""

    def build() -> Built:
        import transformers

        return getattr(transformers, model)(config(kind, **changed)), batch()

    return build


def _whisper() -> dict[str, Any]:
    return {"input_features": torch.randn(BATCH, 16, 64), "labels": tokens(BATCH, 8), "use_cache": False}


def _series(lags: int = 3) -> Callable[[], dict[str, Any]]:
    def batch() -> dict[str, Any]:
        past, future = 12 + lags, 4
        return {
            "past_values": torch.randn(BATCH, past),
            "past_time_features": torch.randn(BATCH, past, 1),
            "past_observed_mask": torch.ones(BATCH, past),
            "future_values": torch.randn(BATCH, future),
            "future_time_features": torch.randn(BATCH, future, 1),
        }

    return batch


SERIES = {
    "prediction_length": 4,
    "context_length": 12,
    "lags_sequence": [1, 2, 3],
    "num_time_features": 1,
    "d_model": WIDTH,
}


def _image() -> dict[str, Any]:
    return {"pixel_values": torch.randn(BATCH, 3, IMAGE, IMAGE), "labels": torch.tensor([0, 2])}


def _pair() -> dict[str, Any]:
    return {
        "input_ids": tokens(BATCH, LENGTH),
        "attention_mask": torch.ones(BATCH, LENGTH, dtype=torch.long),
        "pixel_values": torch.randn(BATCH, 3, IMAGE, IMAGE),
        "return_loss": True,
    }


def _tower(**more: Any) -> dict[str, Any]:
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    return {name: TINY[name] for name in names} | more


def two_towers(model: str, kind: str) -> Build:
    text = _tower(vocab_size=VOCABULARY, max_position_embeddings=LENGTH, eos_token_id=1, projection_dim=WIDTH)
    seen = _tower(image_size=IMAGE, patch_size=8, projection_dim=WIDTH)
    return named(model, kind, _pair, text_config=text, vision_config=seen, projection_dim=WIDTH)


CAUSAL = """
    llama mistral qwen2 qwen3 gemma gemma2 gemma3_text phi phi3 gpt2 gpt_neo gpt_neox gptj gpt_bigcode
    falcon bloom mpt opt olmo olmo2 olmo3 cohere cohere2 stablelm starcoder2 granite nemotron glm glm4
    smollm3 helium persimmon codegen biogpt xglm ctrl openai-gpt xlnet mamba mamba2 falcon_mamba rwkv
    recurrent_gemma diffllama exaone4 mixtral qwen2_moe qwen3_moe deepseek_v2 deepseek_v3 gpt_oss olmoe
    phimoe granitemoe jamba bamba jetmoe qwen3_next glm4_moe dbrx ernie4_5 ernie4_5_moe minimax lfm2
    modernbert-decoder
""".split()  # noqa: SIM905
MASKED = """
    bert roberta distilbert albert electra deberta deberta-v2 camembert convbert mobilebert squeezebert
    fnet funnel mpnet nystromformer roformer rembert modernbert esm ibert big_bird longformer
    megatron-bert xlm flaubert eurobert
""".split()  # noqa: SIM905
SEQ2SEQ = """
    bart mbart t5 mt5 umt5 longt5 pegasus pegasus_x blenderbot blenderbot-small marian m2m_100 plbart
    led prophetnet mvp switch_transformers nllb-moe fsmt bigbird_pegasus
""".split()  # noqa: SIM905
IMAGES = """
    vit beit dinov2 convnext convnextv2 swin swinv2 resnet regnet mobilenet_v1 mobilenet_v2 mobilevit
    efficientnet poolformer pvt pvt_v2 segformer cvt hiera focalnet bit swiftformer vit_msn
    data2vec-vision
""".split()  # noqa: SIM905

WINDOWS = {"patch_size": 4, "window_size": 4, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2]}
LATENT = {
    "num_key_value_heads": HEADS,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "n_group": 2,
    "topk_group": 1,
}

CHANGED: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "ctrl": {"dff": 2 * WIDTH},
    "mamba2": {"num_heads": 4, "head_dim": 16},
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "bamba": {"mamba_n_heads": 4, "mamba_d_head": 16},
    "t5": {"decoder_start_token_id": 0},
    "longt5": {"decoder_start_token_id": 0},
    "switch_transformers": {"decoder_start_token_id": 0},
    "led": {
        "max_encoder_position_embeddings": 64,
        "max_decoder_position_embeddings": 64,
        "attention_window": 8,
    },
    "longformer": {"attention_window": 8},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "fsmt": {"src_vocab_size": VOCABULARY, "tgt_vocab_size": VOCABULARY},
    "swin": WINDOWS,
    "swinv2": WINDOWS,
    "efficientnet": {"hidden_dim": 2560},
    "hiera": {"image_size": [64, 64], "embed_dim": 16},
    "yolos": {"image_size": [64, 64], "num_detection_tokens": 8},
    "convnext": {"hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2},
    "convnextv2": {"hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2},
    "whisper": {"num_mel_bins": 16, "max_source_positions": 32, "max_target_positions": 16},
}
"""What a model needs beside `TINY` to be small, or to be whole."""


def entries() -> Iterator[tuple[str, Build]]:
    for kinds, task in ((CAUSAL, causal), (MASKED, masked), (SEQ2SEQ, seq2seq), (IMAGES, image)):
        yield from ((kind, task(kind, **CHANGED.get(kind, {}))) for kind in kinds)
    for kind in ("wav2vec2", "hubert", "wavlm", "unispeech-sat", "data2vec-audio", "sew"):
        yield f"{kind} (classification)", audio(kind)
    yield "wav2vec2 (CTC)", ctc("wav2vec2")
    yield "whisper", named("WhisperForConditionalGeneration", "whisper", _whisper, **CHANGED["whisper"])
    for kind, model in (
        ("time_series_transformer", "TimeSeriesTransformerForPrediction"),
        ("informer", "InformerForPrediction"),
        ("autoformer", "AutoformerForPrediction"),
    ):
        yield kind, named(model, kind, _series(), **SERIES, **CHANGED.get(kind, {}))
    yield "deit", named("DeiTForImageClassification", "deit", _image)
    yield "clip", two_towers("CLIPModel", "clip")
    yield "siglip", two_towers("SiglipModel", "siglip")
    for kind in ("segformer", "upernet", "mobilevit"):
        yield f"{kind} (segmentation)", segmentation(kind, **CHANGED.get(f"{kind} (segmentation)", {}))
    for kind in ("detr", "yolos"):
        yield kind, detection(kind, **CHANGED.get(kind, {}))
