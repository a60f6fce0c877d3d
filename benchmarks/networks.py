"""The registries: networks that run on a GPU for the exactness tables, and those that are only planned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import encoders
import language
import recurrent
import segmentation
import vision
from language import GPT, GPTBlock, tokens
from vision import Bottleneck, DenseBlock, densenet161, images, resnet, vgg19

__all__ = ["CORPUS", "NETWORKS", "Batch", "Bottleneck", "DenseBlock", "GPTBlock", "Network"]

Batch = tuple[Tensor, ...]


def _gpt(device: str) -> tuple[nn.Module, Batch]:
    model = GPT(12, 1024, 50304, 1024).to(device, torch.bfloat16)
    return model, tokens(16, 1024, 50304, device)


NETWORKS: dict[str, Callable[[str], tuple[nn.Module, Batch]]] = {
    "gpt": _gpt,
    "resnet50": lambda device: (resnet((3, 4, 6, 3)).to(device), images(96, device)),
    "resnet152": lambda device: (resnet((3, 8, 36, 3)).to(device), images(48, device)),
    "vgg19": lambda device: (vgg19().to(device), images(64, device)),
    "densenet161": lambda device: (densenet161().to(device), images(32, device)),
}
"""Networks by name, at the batch sizes of the tables."""

Step = tuple[nn.Module, Batch]


@dataclass(frozen=True)
class Network:
    """How a training step is built on the meta device, and its batch in words."""

    batch: str
    build: Callable[[], Step]


def of_images(net: Callable[[], nn.Module], batch: int) -> Callable[[], Step]:
    return lambda: (net(), images(batch, "meta"))


def pspnet() -> Step:
    """On ResNet-101 at 713²: the peak nearest to the paper's (with ResNet-50, or at 473², about half)."""
    return segmentation.PSPNet(19), segmentation.scenes(2, "meta", side=713, classes=19)


def unet() -> Step:
    return segmentation.UNet(), segmentation.cells(8, "meta")


def gpt2_medium() -> Step:
    """No dropout in the attention: traced on the CPU it writes out all scores, unlike a GPU's kernel."""
    model = GPT(24, 1024, 50257, 1024, dropout=0.1, tied=True)
    return model, tokens(8, 1024, 50257, "meta")


def llama_1b() -> Step:
    model = language.Llama(16, 2048, 128256, heads=32, groups=8, hidden=8192)
    return model, tokens(4, 2048, 128256, "meta")


def bert_base() -> Step:
    ids, targets = encoders.token_batches(2, 32, 512, 30522, "meta")
    return encoders.Bert(), (ids, torch.zeros_like(ids), targets)


def t5_small() -> Step:
    return encoders.T5(), encoders.token_batches(3, 16, 512, 32128, "meta")


def bert_base_hf() -> Step:
    """With dropout in the attention, and therefore with all its scores written out."""
    model = encoders.Transformers("BertForMaskedLM", "BertConfig")
    return model, encoders.token_batches(2, 32, 512, 30522, "meta")


def t5_small_hf() -> Step:
    options = {"decoder_start_token_id": 0, "use_cache": False}
    model = encoders.Transformers("T5ForConditionalGeneration", "T5Config", **options)
    return model, encoders.token_batches(2, 16, 512, 32128, "meta")


def mamba() -> Step:
    return recurrent.Mamba(24, 768, 50288), tokens(8, 1024, 50288, "meta")


def moe() -> Step:
    model = language.moe(12, 768, 50304, 1024, experts=8)
    return model, tokens(8, 1024, 50304, "meta")


def lstm200() -> Step:
    return recurrent.LSTM(1024, 10000), tokens(64, 200, 10000, "meta")


def gpt_deep() -> Step:
    """Thin, but with thousands of real ops: for the time that planning takes."""
    model = GPT(208, 256, 4096, 512).to(torch.bfloat16)
    return model, tokens(8, 512, 4096, "meta")


CORPUS: dict[str, Network] = {
    "pspnet": Network("2 x 713²", pspnet),
    "unet": Network("8 x 572²", unet),
    "resnet50": Network("96 x 224²", lambda: NETWORKS["resnet50"]("meta")),
    "resnet152": Network("48 x 224²", lambda: NETWORKS["resnet152"]("meta")),
    "vgg19": Network("64 x 224²", lambda: NETWORKS["vgg19"]("meta")),
    "densenet161": Network("32 x 224²", lambda: NETWORKS["densenet161"]("meta")),
    "googlenet": Network("256 x 224²", of_images(vision.GoogLeNet, 256)),
    "vit_b16": Network("64 x 224²", of_images(lambda: vision.Classifier(vision.ViT(12, 768)), 64)),
    "gpt2_medium": Network("8 x 1024", gpt2_medium),
    "llama_1b": Network("4 x 2048", llama_1b),
    "bert_base": Network("32 x 512", bert_base),
    "t5_small": Network("16 x 512", t5_small),
    "mamba": Network("8 x 1024", mamba),
    "moe": Network("8 x 1024", moe),
    "lstm200": Network("64 x 200", lstm200),
    "bert_base_hf": Network("32 x 512", bert_base_hf),
    "t5_small_hf": Network("16 x 512", t5_small_hf),
    "gpt_deep": Network("8 x 512", gpt_deep),
}
"""Training steps by name, to be built on the meta device."""
