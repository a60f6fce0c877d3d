"""Image classifiers of `timm`, on small images, with fewer blocks where a model takes their number."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["entries"]

BATCH, CLASSES = 2, 5
BLOCKS = {"img_size": 32, "patch_size": 8, "depth": 2}
STAGES = {"depths": (1, 1, 1, 1), "dims": (16, 16, 32, 32)}

MODELS: dict[str, dict[str, Any]] = {
    "resnet10t": {},
    "resnet18": {},
    "resnetv2_18": {},
    "regnetx_002": {},
    "mobilenetv3_small_050": {},
    "mobilenetv4_conv_small_050": {},
    "lcnet_035": {},
    "mnasnet_small": {},
    "ghostnet_050": {},
    "tinynet_e": {},
    "repvgg_a0": {},
    "hgnetv2_b0": {},
    "convnext_atto": STAGES,
    "convnextv2_atto": STAGES,
    "inception_next_atto": STAGES,
    "vit_tiny_patch16_224": BLOCKS,
    "deit_tiny_distilled_patch16_224": BLOCKS,
    "beit_base_patch16_224": BLOCKS | {"embed_dim": 32, "num_heads": 4},
    "eva02_tiny_patch14_224": BLOCKS,
    "cait_xxs24_224": BLOCKS,
    "xcit_nano_12_p16_224": {"img_size": 32, "patch_size": 8, "depth": 2},
    "mixer_s16_224": {"img_size": 32},
    "gmlp_ti16_224": {"img_size": 32},
    "swin_tiny_patch4_window7_224": {
        "img_size": 32,
        "window_size": 4,
        "embed_dim": 16,
        "depths": (1, 1),
        "num_heads": (2, 2),
    },
    "sequencer2d_s": {"layers": (1, 1, 1, 1), "embed_dims": (16, 32, 32, 32)},
    "pvt_v2_b0": {"depths": (1, 1, 1, 1)},
    "poolformer_s12": {},
}


class Classified(nn.Module):
    """A network with the loss of its classes."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        found = self.network(images)
        parts = found if isinstance(found, tuple) else (found,)
        return sum(nn.functional.cross_entropy(part, labels) for part in parts)  # type: ignore[return-value]


def _build(name: str, changed: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    import timm

    network = timm.create_model(name, num_classes=CLASSES, **changed)
    size = changed.get("img_size", 64)
    return Classified(network), {
        "images": torch.randn(BATCH, 3, size, size),
        "labels": torch.randint(CLASSES, (BATCH,)),
    }


def entries() -> Iterator[tuple[str, Callable[[], Any]]]:
    for name, changed in MODELS.items():
        yield name, lambda name=name, changed=changed: _build(name, changed)
