"""Denoisers and autoencoders of `diffusers`, with a few channels and blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["entries"]

BATCH, SIZE, WIDTH = 2, 16, 32
NARROW = {"block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 8}
HEADS = {"num_layers": 1, "num_attention_heads": 2, "attention_head_dim": 16}


class Denoised(nn.Module):
    """A network with the mean square of what it leaves of some noise."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, noise: Tensor, **inputs: Any) -> Tensor:
        found = self.network(**inputs).sample
        return nn.functional.mse_loss(found[:, : noise.shape[1]], noise)


def image(channels: int = 4) -> Tensor:
    return torch.randn(BATCH, channels, SIZE, SIZE)


def words(width: int = WIDTH) -> Tensor:
    return torch.randn(BATCH, 6, width)


def times() -> Tensor:
    return torch.tensor([3, 500])


def unet() -> tuple[str, dict[str, Any], dict[str, Any]]:
    blocks = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D")}
    blocks["up_block_types"] = ("AttnUpBlock2D", "UpBlock2D")
    return "UNet2DModel", {"sample_size": SIZE, **NARROW, **blocks}, {"sample": image(3), "timestep": times()}


def conditioned() -> tuple[str, dict[str, Any], dict[str, Any]]:
    blocks = {"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D")}
    blocks["up_block_types"] = ("UpBlock2D", "CrossAttnUpBlock2D")
    options = {"sample_size": SIZE, "cross_attention_dim": WIDTH, "attention_head_dim": 8, **NARROW, **blocks}
    inputs = {"sample": image(), "timestep": times(), "encoder_hidden_states": words()}
    return "UNet2DConditionModel", options, inputs


def autoencoder() -> tuple[str, dict[str, Any], dict[str, Any]]:
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    return "AutoencoderKL", {**NARROW, **blocks}, {"sample": image(3), "sample_posterior": True}


def tiny_autoencoder() -> tuple[str, dict[str, Any], dict[str, Any]]:
    channels = {"encoder_block_out_channels": (8, 8), "decoder_block_out_channels": (8, 8)}
    blocks = {"num_encoder_blocks": (1, 1), "num_decoder_blocks": (1, 1)}
    return "AutoencoderTiny", {**channels, **blocks}, {"sample": image(3)}


def dit() -> tuple[str, dict[str, Any], dict[str, Any]]:
    options = {"sample_size": SIZE, "num_embeds_ada_norm": 10, "norm_num_groups": 8, **HEADS}
    inputs = {"hidden_states": image(), "timestep": times(), "class_labels": torch.tensor([1, 2])}
    return "DiTTransformer2DModel", options, inputs


def pixart() -> tuple[str, dict[str, Any], dict[str, Any]]:
    options = {"sample_size": SIZE, "cross_attention_dim": WIDTH, "caption_channels": WIDTH, **HEADS}
    inputs = {"hidden_states": image(), "timestep": times(), "encoder_hidden_states": words()}
    added = {"added_cond_kwargs": {"resolution": None, "aspect_ratio": None}}
    return "PixArtTransformer2DModel", {**options, "use_additional_conditions": False}, inputs | added


def sd3() -> tuple[str, dict[str, Any], dict[str, Any]]:
    options = {
        "sample_size": SIZE,
        "in_channels": 4,
        "out_channels": 4,
        "joint_attention_dim": WIDTH,
        **HEADS,
    }
    options |= {"caption_projection_dim": WIDTH, "pooled_projection_dim": 16, "pos_embed_max_size": 16}
    inputs = {"hidden_states": image(), "timestep": times(), "encoder_hidden_states": words()}
    return "SD3Transformer2DModel", options, inputs | {"pooled_projections": torch.randn(BATCH, 16)}


def transformer() -> tuple[str, dict[str, Any], dict[str, Any]]:
    options = {"in_channels": 8, "norm_num_groups": 8, "cross_attention_dim": WIDTH, **HEADS}
    return "Transformer2DModel", options, {"hidden_states": image(8), "encoder_hidden_states": words()}


def sana() -> tuple[str, dict[str, Any], dict[str, Any]]:
    options = {"sample_size": SIZE, "in_channels": 4, "out_channels": 4, "caption_channels": WIDTH, **HEADS}
    options |= {"num_cross_attention_heads": 2, "cross_attention_head_dim": 16, "cross_attention_dim": WIDTH}
    inputs = {"hidden_states": image(), "timestep": times(), "encoder_hidden_states": words()}
    return "SanaTransformer2DModel", options, inputs


KINDS = (*(unet, conditioned, autoencoder, tiny_autoencoder, dit, pixart, sd3, transformer, sana),)


def _build(
    kind: Callable[[], tuple[str, dict[str, Any], dict[str, Any]]],
) -> tuple[nn.Module, dict[str, Any]]:
    import diffusers

    name, options, inputs = kind()
    noise = inputs.get("sample", inputs.get("hidden_states"))
    return Denoised(getattr(diffusers, name)(**options)), {"noise": torch.randn_like(noise), **inputs}


def entries() -> Iterator[tuple[str, Callable[[], Any]]]:
    for kind in KINDS:
        yield kind()[0], lambda kind=kind: _build(kind)
