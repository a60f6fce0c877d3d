"""Image networks of the benchmarks, written from their papers; each takes a batch and gives its loss."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from language import GPTBlock


class Classifier(nn.Module):
    """A network and its cross-entropy, so that the loss is part of the step."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.net(x), target)


class Bottleneck(nn.Module):
    """The residual block of ResNet-50 and deeper (He et al. 2015)."""

    def __init__(self, inputs: int, width: int, stride: int, dilation: int = 1) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, dilation, dilation, bias=False)
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


def bottlenecks(
    inputs: int, width: int, depth: int, *, stride: int = 1, dilation: int = 1
) -> list[nn.Module]:
    """A stage of a residual network."""
    first = Bottleneck(inputs, width, stride, dilation)
    return [first, *(Bottleneck(4 * width, width, 1, dilation) for _ in range(depth - 1))]


def resnet(depths: tuple[int, ...]) -> nn.Module:
    stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)]
    layers: list[nn.Module] = [*stem, nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for stage, depth in enumerate(depths):
        width = 64 * 2**stage
        layers += bottlenecks(inputs, width, depth, stride=2 if stage else 1)
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


def conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    """A convolution that keeps the size (over its stride), and its ReLU."""
    return nn.Sequential(nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2), nn.ReLU(inplace=True))


class Inception(nn.Module):
    """Four branches side by side (Szegedy et al. 2014); `outputs` as in the rows of its table 1."""

    def __init__(self, inputs: int, outputs: tuple[int, ...]) -> None:
        super().__init__()
        one, three_in, three, five_in, five, pooled = outputs
        self.one = conv(inputs, one, 1)
        self.three = nn.Sequential(conv(inputs, three_in, 1), conv(three_in, three, 3))
        self.five = nn.Sequential(conv(inputs, five_in, 1), conv(five_in, five, 5))
        self.pooled = nn.Sequential(nn.MaxPool2d(3, 1, 1), conv(inputs, pooled, 1))
        self.outputs = one + three + five + pooled

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.one(x), self.three(x), self.five(x), self.pooled(x)], 1)


INCEPTIONS = {
    "3a": (64, 96, 128, 16, 32, 32),
    "3b": (128, 128, 192, 32, 96, 64),
    "4a": (192, 96, 208, 16, 48, 64),
    "4b": (160, 112, 224, 24, 64, 64),
    "4c": (128, 128, 256, 24, 64, 64),
    "4d": (112, 144, 288, 32, 64, 64),
    "4e": (256, 160, 320, 32, 128, 128),
    "5a": (256, 160, 320, 32, 128, 128),
    "5b": (384, 192, 384, 48, 128, 128),
}


def side_head(inputs: int) -> nn.Sequential:
    """An auxiliary classifier of GoogLeNet."""
    layers: list[nn.Module] = [nn.AvgPool2d(5, 3), conv(inputs, 128, 1), nn.Flatten()]
    layers += [nn.Linear(128 * 16, 1024), nn.ReLU(inplace=True), nn.Dropout(0.7), nn.Linear(1024, 1000)]
    return nn.Sequential(*layers)


class GoogLeNet(nn.Module):
    """Inception v1 as published: local response normalisation, two auxiliary losses of weight 0.3."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.LocalResponseNorm(5)
        pool = nn.MaxPool2d(3, 2, ceil_mode=True)
        self.stem = nn.Sequential(
            conv(3, 64, 7, 2), pool, norm, conv(64, 64, 1), conv(64, 192, 3), norm, pool
        )
        self.pool, self.blocks, self.sides = pool, nn.ModuleDict(), nn.ModuleDict()
        inputs = 192
        for name, outputs in INCEPTIONS.items():
            block = Inception(inputs, outputs)
            self.blocks[name] = block
            inputs = block.outputs
            if name in ("4a", "4d"):
                self.sides[name] = side_head(inputs)
        self.head = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.4), nn.Linear(inputs, 1000)
        )

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = self.stem(x)
        side_losses = []
        for name, block in self.blocks.items():
            x = block(x)
            if name in self.sides:
                side_losses.append(F.cross_entropy(self.sides[name](x), target))
            if name in ("3b", "4e"):
                x = self.pool(x)
        return F.cross_entropy(self.head(x), target) + 0.3 * sum(side_losses)


class ViT(nn.Module):
    """A vision transformer with a class token (Dosovitskiy et al. 2020)."""

    def __init__(self, layers: int, width: int, *, patch: int = 16, size: int = 224) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(torch.zeros(1, (size // patch) ** 2 + 1, width))
        self.blocks = nn.Sequential(*(GPTBlock(width, width // 64, causal=False) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.places
        return self.head(self.norm(self.blocks(x))[:, 0])


def images(batch: int, device: str) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 3, 224, 224, device=device), torch.randint(1000, (batch,), device=device)
