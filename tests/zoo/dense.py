"""Perceptrons: plain, normalised, shared, partly frozen."""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from .case import Built, Residual, Supervised, case, labels

WIDTH, DEPTH, BATCH = 32, 8, 1024


def layers(depth: int = DEPTH, width: int = WIDTH, act: type[nn.Module] = nn.ReLU) -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(width, width), act()) for _ in range(depth)]


def batch(width: int = WIDTH) -> tuple[Tensor, Tensor]:
    return torch.randn(BATCH, width), labels(BATCH, classes=width)


def classifier(*modules: nn.Module) -> Built:
    return Supervised(nn.Sequential(*modules), functional.cross_entropy), batch(), {}


@case("loss_inside")
def mlp() -> Built:
    return classifier(*layers())


@case("loss_inside", "layernorm")
def mlp_gelu_layernorm() -> Built:
    def block() -> nn.Module:
        return Residual(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    return classifier(*(block() for _ in range(6)))


@case("loss_inside", "batchnorm", "mutates")
def mlp_batchnorm() -> Built:
    return classifier(*(nn.Sequential(layer, nn.BatchNorm1d(WIDTH)) for layer in layers(6, act=nn.SiLU)))


@case("loss_inside", "bf16", "layernorm")
def mlp_bf16() -> Built:
    model, (x, target), _ = classifier(*layers(act=nn.GELU), nn.LayerNorm(WIDTH))
    return model.bfloat16(), (x.bfloat16(), target), {}


@case("loss_inside")
def autoencoder() -> Built:
    widths = [64, 48, 32, 16, 8, 16, 32, 48, 64]
    net = nn.Sequential(*(nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in pairwise(widths)))
    x = torch.rand(BATCH, widths[0])
    return Supervised(net, functional.mse_loss), (x, x), {}


@case("loss_inside", "tied")
def linear_used_many_times() -> Built:
    shared, other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    return classifier(shared, nn.Tanh(), other, nn.Tanh(), *[shared, nn.GELU(), other, nn.SiLU()] * 2)


class Siamese(nn.Module):
    def __init__(self):
        super().__init__()
        self.tower = nn.Sequential(*layers(6))

    def forward(self, left: Tensor, right: Tensor, same: Tensor) -> Tensor:
        return functional.cosine_embedding_loss(self.tower(left), self.tower(right), same)


@case("loss_inside", "tied")
def siamese() -> Built:
    same = labels(BATCH, classes=2) * 2 - 1
    return Siamese(), (torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH), same), {}


@case("loss_inside", "frozen")
def frozen_middle() -> Built:
    stack = layers()
    for layer in stack[3:6]:
        layer.requires_grad_(False)
    return classifier(*stack)


@case("loss_inside", "frozen")
def frozen_first() -> Built:
    stack = layers()
    for layer in stack[:4]:
        layer.requires_grad_(False)
    return classifier(*stack)


@case("loss_inside", "frozen")
def frozen_biases() -> Built:
    stack = layers(act=nn.GELU)
    for layer in stack:
        layer[0].bias.requires_grad_(False)
    return classifier(*stack)


class Adapter(nn.Module):
    """A frozen linear layer with a trained correction of low rank."""

    def __init__(self, width: int, rank: int):
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return functional.gelu(self.base(x) + 2.0 * self.up(self.down(x)))


@case("loss_inside", "frozen")
def low_rank_adapters() -> Built:
    return classifier(*(Adapter(WIDTH, 4) for _ in range(6)))


@case("loss_inside")
def input_needs_gradient() -> Built:
    model, (x, target), _ = classifier(*layers(6, act=nn.Softplus))
    return model, (x.requires_grad_(), target), {}
