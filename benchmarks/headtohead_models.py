"""The training steps of the head-to-head: a model and its batch on a device, in full and tiny.

The transformers are in bf16, parameters included; the convolutional networks in fp32, with TF32 products on a
GPU. Embeddings start small, as they do in training: with PyTorch's own start, a head that shares them gives
logits so large that bf16 gradients are mostly rounding. The tiny versions have the same parts and run on a
CPU within a second.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import encoders
import language
import segmentation
import vision

Batch = tuple[Tensor, ...]
Step = tuple[nn.Module, Batch]
SEED = 0


@dataclass(frozen=True)
class Subject:
    """How a step is built, at full size and tiny, and the dtype of its parameters and images."""

    dtype: torch.dtype
    full: Callable[[], Step]
    tiny: Callable[[], Step]

    def build(self, device: str, *, tiny: bool = False) -> Step:
        torch.manual_seed(SEED)
        with torch.device(device):
            model, batch = self.tiny() if tiny else self.full()
            for module in model.modules():
                if isinstance(module, nn.Embedding):
                    nn.init.normal_(module.weight, std=0.02)
        cast = tuple(part.to(self.dtype) if part.is_floating_point() else part for part in batch)
        return model.to(self.dtype), cast


def gpt(layers: int, width: int, vocabulary: int, batch: int, length: int) -> Step:
    ids = language.tokens(batch, length, vocabulary, here())
    return language.GPT(layers, width, vocabulary, length), ids


def llama(layers: int, width: int, vocabulary: int, batch: int, length: int) -> Step:
    heads = width // 64
    model = language.Llama(
        layers, width, vocabulary, heads=heads, groups=max(heads // 4, 1), hidden=4 * width
    )
    return model, language.tokens(batch, length, vocabulary, here())


def bert(layers: int, width: int, vocabulary: int, batch: int, length: int) -> Step:
    ids, targets = encoders.token_batches(2, batch, length, vocabulary, here())
    return encoders.Bert(layers, width, vocabulary, length), (ids, torch.zeros_like(ids), targets)


def of_images(net: nn.Module, batch: int, side: int = 224) -> Step:
    x, target = vision.images(batch, here())
    return net, (x[:, :, :side, :side].contiguous(), target)


def vit(layers: int, width: int, batch: int, side: int) -> Step:
    return of_images(vision.Classifier(vision.ViT(layers, width, size=side)), batch, side)


def tiny_densenet() -> Step:
    layers: list[nn.Module] = [nn.Conv2d(3, 8, 3, 2, 1, bias=False)]
    layers += [vision.DenseBlock(8, 8, 3), nn.AvgPool2d(2), vision.DenseBlock(32, 8, 3)]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(56, 1000)]
    return of_images(vision.Classifier(nn.Sequential(*layers)), 2, 32)


def tiny_unet() -> Step:
    x = torch.randn(1, 1, 68, 68)
    return segmentation.UNet(width=8, depth=2), (x, torch.randint(2, (1, 28, 28)))


def here() -> str:
    """The device of the `with torch.device(...)` around the call."""
    return str(torch.get_default_device())


def tiny_resnet(batch: int) -> Callable[[], Step]:
    return lambda: of_images(vision.resnet((1, 1)), batch, 32)


BF16, FP32 = torch.bfloat16, torch.float32
SUBJECTS: dict[str, Subject] = {
    "gpt": Subject(BF16, lambda: gpt(12, 1024, 50304, 16, 1024), lambda: gpt(2, 64, 128, 2, 32)),
    "llama_1b": Subject(BF16, lambda: llama(16, 2048, 128256, 8, 2048), lambda: llama(2, 64, 128, 2, 32)),
    "vit_b16": Subject(BF16, lambda: vit(12, 768, 256, 224), lambda: vit(2, 64, 2, 32)),
    "bert_base": Subject(BF16, lambda: bert(12, 768, 30522, 64, 512), lambda: bert(2, 64, 128, 2, 32)),
    "resnet50": Subject(FP32, lambda: of_images(vision.resnet((3, 4, 6, 3)), 96), tiny_resnet(2)),
    "resnet50_184": Subject(FP32, lambda: of_images(vision.resnet((3, 4, 6, 3)), 184), tiny_resnet(4)),
    "unet": Subject(FP32, lambda: (segmentation.UNet(), segmentation.cells(8, here())), tiny_unet),
    "densenet161": Subject(FP32, lambda: of_images(vision.densenet161(), 32), tiny_densenet),
}
"""Steps by the names that the results have."""
