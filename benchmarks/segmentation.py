"""Segmentation networks of the benchmarks, written from their papers; each gives its loss."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vision import bottlenecks


def normed(inputs: int, outputs: int, kernel: int, stride: int = 1) -> list[nn.Module]:
    """A convolution that keeps the size (over its stride), BatchNorm and ReLU."""
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
    return [conv, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]


def enlarge(x: Tensor, size: torch.Size) -> Tensor:
    return F.interpolate(x, size=size, mode="bilinear", align_corners=True)


class PyramidPooling(nn.Module):
    """The image pooled to 1, 2, 3 and 6 bins a side, each reduced, enlarged again, beside the input."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        bins = (1, 2, 3, 6)
        reduced = inputs // len(bins)
        self.parts = nn.ModuleList(
            nn.Sequential(nn.AdaptiveAvgPool2d(side), *normed(inputs, reduced, 1)) for side in bins
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, *(enlarge(part(x), x.shape[2:]) for part in self.parts)], 1)


def pixel_head(inputs: int, width: int, classes: int) -> nn.Sequential:
    return nn.Sequential(*normed(inputs, width, 3), nn.Dropout(0.1), nn.Conv2d(width, classes, 1))


class PSPNet(nn.Module):
    """Pyramid pooling on a dilated ResNet-101, with the auxiliary loss of weight 0.4 (Zhao et al. 2017)."""

    def __init__(self, classes: int, depths: tuple[int, int, int, int] = (3, 4, 23, 3)) -> None:
        super().__init__()
        stem = [*normed(3, 64, 3, 2), *normed(64, 64, 3), *normed(64, 128, 3), nn.MaxPool2d(3, 2, 1)]
        stages = [
            *bottlenecks(128, 64, depths[0]),
            *bottlenecks(256, 128, depths[1], stride=2),
            *bottlenecks(512, 256, depths[2], dilation=2),
        ]
        self.trunk = nn.Sequential(*stem, *stages)
        self.last = nn.Sequential(*bottlenecks(1024, 512, depths[3], dilation=4))
        self.side = pixel_head(1024, 256, classes)
        self.head = nn.Sequential(PyramidPooling(2048), pixel_head(4096, 512, classes))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        size, x = x.shape[2:], self.trunk(x)
        side_loss = F.cross_entropy(enlarge(self.side(x), size), target)
        return F.cross_entropy(enlarge(self.head(self.last(x)), size), target) + 0.4 * side_loss


class TwoConvs(nn.Sequential):
    """Two 3x3 convolutions without padding, each with its ReLU."""

    def __init__(self, inputs: int, outputs: int) -> None:
        pairs = (nn.Conv2d(inputs, outputs, 3), nn.ReLU(inplace=True))
        super().__init__(*pairs, nn.Conv2d(outputs, outputs, 3), nn.ReLU(inplace=True))


def crop(x: Tensor, size: torch.Size) -> Tensor:
    top, left = ((x.shape[axis] - size[axis]) // 2 for axis in (2, 3))
    return x[:, :, top : top + size[2], left : left + size[3]]


class UNet(nn.Module):
    """The original U-Net: no padding, cropped skips, dropout at the bottom (Ronneberger et al. 2015)."""

    def __init__(self, classes: int = 2, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        self.down = nn.ModuleList(
            TwoConvs(inputs, outputs) for inputs, outputs in zip([1, *widths], widths, strict=False)
        )
        self.rise = nn.ModuleList(nn.ConvTranspose2d(2 * size, size, 2, 2) for size in reversed(widths[:-1]))
        self.up = nn.ModuleList(TwoConvs(2 * size, size) for size in reversed(widths[:-1]))
        self.pool, self.drop = nn.MaxPool2d(2), nn.Dropout(0.5)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        skips = []
        for block in self.down[:-1]:
            skips.append(block(x))
            x = self.pool(skips[-1])
        x = self.drop(self.down[-1](x))
        for rise, block in zip(self.rise, self.up, strict=True):
            x = rise(x)
            x = block(torch.cat([crop(skips.pop(), x.shape), x], 1))
        return F.cross_entropy(self.head(x), target)


def scenes(batch: int, device: str, *, side: int, classes: int) -> tuple[Tensor, Tensor]:
    """Colour images and the class of each pixel."""
    x = torch.randn(batch, 3, side, side, device=device)
    return x, torch.randint(classes, (batch, side, side), device=device)


def cells(batch: int, device: str) -> tuple[Tensor, Tensor]:
    """The 572 x 572 grey images of U-Net's paper and the class of each of its 388 x 388 output pixels."""
    x = torch.randn(batch, 1, 572, 572, device=device)
    return x, torch.randint(2, (batch, 388, 388), device=device)
