"""The networks of the benchmarks, written from their papers; each takes a batch and gives its loss."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch = tuple[Tensor, Tensor]


class Classifier(nn.Module):
    """A network and its cross-entropy, so that the loss is part of the step."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.net(x), target)


class Bottleneck(nn.Module):
    """The residual block of ResNet-50 and deeper (He et al. 2015)."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = nn.Identity()
        if stride != 1 or inputs != outputs:
            conv = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(conv, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        return self.relu(self.bn3(self.conv3(y)) + self.shortcut(x))


def resnet(depths: tuple[int, ...]) -> nn.Module:
    stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)]
    layers: list[nn.Module] = [*stem, nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for stage, depth in enumerate(depths):
        width = 64 * 2**stage
        for index in range(depth):
            layers.append(Bottleneck(inputs, width, 2 if stage and not index else 1))
            inputs = 4 * width
    return Classifier(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000)))


def vgg19() -> nn.Module:
    layers: list[nn.Module] = []
    inputs = 3
    for width, depth in ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4)):
        for _ in range(depth):
            layers += [nn.Conv2d(inputs, width, 3, padding=1), nn.ReLU(inplace=True)]
            inputs = width
        layers.append(nn.MaxPool2d(2))
    head: list[nn.Module] = [nn.Flatten(), nn.Linear(512 * 49, 4096), nn.ReLU(inplace=True), nn.Dropout()]
    head += [nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(4096, 1000)]
    return Classifier(nn.Sequential(*layers, *head))


class DenseLayer(nn.Module):
    """A layer that adds its features to all before it (Huang et al. 2016)."""

    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.reduce = nn.Sequential(
            nn.BatchNorm2d(inputs), nn.ReLU(inplace=True), nn.Conv2d(inputs, 4 * growth, 1, bias=False)
        )
        self.grow = nn.Sequential(
            nn.BatchNorm2d(4 * growth),
            nn.ReLU(inplace=True),
            nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False),
        )

    def forward(self, features: list[Tensor]) -> Tensor:
        return self.grow(self.reduce(torch.cat(features, 1)))


class DenseBlock(nn.Module):
    """Dense layers, each of which reads all features so far."""

    def __init__(self, inputs: int, growth: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DenseLayer(inputs + i * growth, growth) for i in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.layers:
            features.append(layer(features))
        return torch.cat(features, 1)


def densenet161() -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 96, 7, 2, 3, bias=False), nn.BatchNorm2d(96)]
    layers += [nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    inputs = 96
    for stage, depth in enumerate((6, 12, 36, 24)):
        if stage:
            layers += [nn.BatchNorm2d(inputs), nn.ReLU(inplace=True)]
            layers += [nn.Conv2d(inputs, inputs // 2, 1, bias=False), nn.AvgPool2d(2)]
            inputs //= 2
        layers.append(DenseBlock(inputs, 48, depth))
        inputs += 48 * depth
    layers += [nn.BatchNorm2d(inputs), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return Classifier(nn.Sequential(*layers, nn.Linear(inputs, 1000)))


class GPTBlock(nn.Module):
    """A pre-norm transformer block with causal attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A language model with its loss."""

    def __init__(self, layers: int, width: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(GPTBlock(width, width // 64) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        logits = self.head(self.norm(self.blocks(x)))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


def images(batch: int, device: str) -> Batch:
    return torch.randn(batch, 3, 224, 224, device=device), torch.randint(1000, (batch,), device=device)


def tokens(batch: int, length: int, vocabulary: int, device: str) -> Batch:
    ids = torch.randint(vocabulary, (batch, length + 1), device=device)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


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
