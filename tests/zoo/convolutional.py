"""Convolutional networks in the shapes of the classic ones."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from .case import Built, Residual, Supervised, case, labels

BATCH, CLASSES = 8, 10


def conv(a: int, b: int, size: int = 3, **options) -> nn.Conv2d:
    return nn.Conv2d(a, b, size, padding=size // 2, bias=False, **options)


def conv_bn(a: int, b: int, size: int = 3, **options) -> nn.Sequential:
    return nn.Sequential(conv(a, b, size, **options), nn.BatchNorm2d(b), nn.ReLU(inplace=True))


def head(channels: int) -> nn.Sequential:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES))


def classifier(*modules: nn.Module, size: int = 24) -> Built:
    batch = torch.randn(BATCH, 3, size, size), labels(BATCH, classes=CLASSES)
    return Supervised(nn.Sequential(*modules), functional.cross_entropy), batch, {}


@case("loss_inside", "conv", "batchnorm", "mutates", "inplace")
def cnn() -> Built:
    return classifier(conv_bn(3, 12), *(conv_bn(12, 12) for _ in range(6)), head(12))


class BasicBlock(nn.Module):
    def __init__(self, a: int, b: int, stride: int):
        super().__init__()
        self.body = nn.Sequential(conv_bn(a, b, stride=stride), conv(b, b), nn.BatchNorm2d(b))
        plain = a == b and stride == 1
        self.skip = nn.Identity() if plain else nn.Sequential(conv(a, b, 1, stride=stride), nn.BatchNorm2d(b))

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        y += self.skip(x)
        return functional.relu(y, inplace=True)


def resnet_body() -> list[nn.Module]:
    widths = [(8, 8, 1), (8, 8, 1), (8, 16, 2), (16, 16, 1), (16, 24, 2), (24, 24, 1)]
    return [conv_bn(3, 8), *(BasicBlock(*w) for w in widths), head(24)]


@case("loss_inside", "conv", "batchnorm", "mutates", "inplace")
def resnet() -> Built:
    return classifier(*resnet_body())


@case("loss_inside", "conv", "batchnorm", "mutates", "inplace", "channels_last")
def resnet_channels_last() -> Built:
    model, (x, target), _ = classifier(*resnet_body())
    return model.to(memory_format=torch.channels_last), (x.to(memory_format=torch.channels_last), target), {}


class Dense(nn.Module):
    """A layer that appends `growth` channels to what it read."""

    def __init__(self, channels: int, growth: int):
        super().__init__()
        self.body = nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU(inplace=True), conv(channels, growth))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.body(x)], dim=1)


@case("loss_inside", "conv", "batchnorm", "mutates", "inplace")
def densenet() -> Built:
    first = [Dense(8 + 6 * i, 6) for i in range(4)]
    second = [Dense(16 + 6 * i, 6) for i in range(4)]
    return classifier(conv(3, 8), *first, conv(32, 16, 1), nn.AvgPool2d(2), *second, head(40))


class Inception(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        quarter = channels // 4
        self.one = conv_bn(channels, quarter, 1)
        self.three = nn.Sequential(conv_bn(channels, quarter, 1), conv_bn(quarter, quarter))
        self.five = nn.Sequential(conv_bn(channels, quarter, 1), conv_bn(quarter, quarter, 5))
        self.pool = nn.Sequential(nn.MaxPool2d(3, 1, padding=1), conv_bn(channels, quarter, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.one(x), self.three(x), self.five(x), self.pool(x)], dim=1)


@case("loss_inside", "conv", "batchnorm", "mutates", "inplace")
def inception() -> Built:
    return classifier(conv_bn(3, 16), *(Inception(16) for _ in range(3)), head(16), size=16)


class UNet(nn.Module):
    """Three levels down and up; `up` makes the module that doubles the size of `channels` channels."""

    def __init__(self, up):
        super().__init__()
        widths = [6, 12, 24]
        self.down = nn.ModuleList(conv_bn(a, b) for a, b in zip([3, *widths[:-1]], widths, strict=True))
        self.bottom = conv_bn(24, 24)
        self.up = nn.ModuleList(up(c) for c in reversed(widths))
        self.merge = nn.ModuleList(conv_bn(2 * c, max(c // 2, 6)) for c in reversed(widths))
        self.out = nn.Conv2d(6, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for level in self.down:
            x = level(x)
            skips.append(x)
            x = functional.max_pool2d(x, 2)
        x = self.bottom(x)
        for up, merge, skip in zip(self.up, self.merge, reversed(skips), strict=True):
            x = merge(torch.cat([up(x), skip], dim=1))
        return self.out(x)


def segmenter(net: nn.Module) -> Built:
    return (
        Supervised(net, functional.cross_entropy),
        (torch.randn(4, 3, 32, 32), labels(4, 32, 32, classes=4)),
        {},
    )


@case("loss_inside", "conv", "batchnorm", "mutates", "inplace")
def unet_transposed() -> Built:
    return segmenter(UNet(lambda c: nn.ConvTranspose2d(c, c, 2, stride=2)))


@case("loss_inside", "conv", "batchnorm", "mutates", "inplace")
def unet_nearest() -> Built:
    return segmenter(UNet(lambda c: nn.Upsample(scale_factor=2)))


@case("loss_inside", "conv", "batchnorm", "mutates", "inplace", "aot_rounds")
def unet_bilinear() -> Built:
    """Bilinear interpolation is traced as gathers and weighted sums, not as its fused kernel."""
    return segmenter(UNet(lambda c: nn.Upsample(scale_factor=2, mode="bilinear")))


class Squeeze(nn.Module):
    """Scale every channel by a gate computed from all of them."""

    def __init__(self, channels: int):
        super().__init__()
        self.gate = nn.Sequential(
            nn.Linear(channels, channels // 4),
            nn.ReLU(),
            nn.Linear(channels // 4, channels),
            nn.Hardsigmoid(),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(x.mean((2, 3)))[:, :, None, None]


@case("loss_inside", "conv", "batchnorm", "mutates", "inplace")
def mobilenet() -> Built:
    def block(a: int, wide: int) -> nn.Module:
        return Residual(
            conv(a, wide, 1),
            nn.BatchNorm2d(wide),
            nn.ReLU6(inplace=True),
            conv(wide, wide, groups=wide),
            nn.BatchNorm2d(wide),
            nn.Hardswish(inplace=True),
            Squeeze(wide),
            conv(wide, a, 1),
            nn.BatchNorm2d(a),
        )

    return classifier(conv_bn(3, 8, stride=2), *(block(8, 24) for _ in range(3)), head(8), size=32)


@case("loss_inside", "conv", "dropout", "random", "inplace")
def vgg() -> Built:
    def stage(a: int, b: int) -> list[nn.Module]:
        relu = nn.ReLU(inplace=True)
        return [nn.Conv2d(a, b, 3, padding=1), relu, nn.Conv2d(b, b, 3, padding=1), relu, nn.MaxPool2d(2)]

    top = [nn.Linear(24 * 9, 32), nn.ReLU(True), nn.Dropout(0.5), nn.Linear(32, CLASSES)]
    return classifier(*stage(3, 8), *stage(8, 16), *stage(16, 24), nn.Flatten(), nn.Dropout(0.3), *top)


@case("loss_inside", "conv")
def groupnorm_cnn() -> Built:
    def block() -> nn.Module:
        return Residual(nn.GroupNorm(4, 12), nn.SiLU(), nn.Conv2d(12, 12, 3, padding=1))

    return classifier(conv(3, 12), *(block() for _ in range(6)), head(12))


@case("loss_inside", "conv")
def instancenorm_cnn() -> Built:
    def block() -> nn.Module:
        return Residual(
            nn.ReflectionPad2d(1), nn.Conv2d(12, 12, 3), nn.InstanceNorm2d(12, affine=True), nn.LeakyReLU(0.1)
        )

    return classifier(conv(3, 12), *(block() for _ in range(6)), head(12))


class WaveNet(nn.Module):
    """Dilated causal convolutions with gates; every layer adds to one sum of skips."""

    def __init__(self, channels: int, depth: int, vocab: int):
        super().__init__()
        self.embed = nn.Embedding(vocab, channels)
        self.gated = nn.ModuleList(nn.Conv1d(channels, 2 * channels, 2, dilation=2**i) for i in range(depth))
        self.mix = nn.ModuleList(nn.Conv1d(channels, 2 * channels, 1) for _ in range(depth))
        self.out = nn.Conv1d(channels, vocab, 1)

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        x = self.embed(tokens).transpose(1, 2)
        total = torch.zeros_like(x)
        for gated, mix in zip(self.gated, self.mix, strict=True):
            a, b = gated(functional.pad(x, (gated.dilation[0], 0))).chunk(2, dim=1)
            step, skip = mix(torch.tanh(a) * torch.sigmoid(b)).chunk(2, dim=1)
            x, total = x + step, total + skip
        return functional.cross_entropy(self.out(functional.relu(total)), target)


@case("loss_inside", "conv")
def wavenet() -> Built:
    tokens = labels(8, 129, classes=32)
    return WaveNet(12, 7, 32), (tokens[:, :-1], tokens[:, 1:]), {}
