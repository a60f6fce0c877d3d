"""Layers that draw random numbers."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from .case import Built, Residual, case, labels
from .convolutional import classifier as image_classifier
from .convolutional import conv, conv_bn, head
from .dense import WIDTH, classifier


def linear(*after: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *after)


@case("loss_inside", "dropout", "random")
def mlp_dropout() -> Built:
    return classifier(*(linear(nn.ReLU(), nn.Dropout(0.1 * (i + 1))) for i in range(6)))


@case("loss_inside", "dropout", "random", "inplace")
def mlp_dropout_inplace() -> Built:
    return classifier(*(linear(nn.GELU(), nn.Dropout(0.2, inplace=True)) for _ in range(6)))


@case("loss_inside", "dropout", "random")
def alpha_dropout() -> Built:
    return classifier(*(linear(nn.SELU(), nn.AlphaDropout(0.1)) for _ in range(6)))


@case("loss_inside", "dropout", "random", "conv", "batchnorm", "mutates", "inplace")
def dropout2d() -> Built:
    blocks = (nn.Sequential(conv_bn(12, 12), nn.Dropout2d(0.2)) for _ in range(6))
    return image_classifier(conv(3, 12), *blocks, head(12))


@case("loss_inside", "random")
def rrelu() -> Built:
    return classifier(*(linear(nn.RReLU()) for _ in range(6)))


class Noise(nn.Module):
    """Gaussian noise added, uniform noise multiplied."""

    def forward(self, x: Tensor) -> Tensor:
        return (x + 0.1 * torch.randn_like(x)) * (0.5 + torch.rand_like(x))


@case("loss_inside", "random")
def noise() -> Built:
    return classifier(*(linear(nn.Tanh(), Noise()) for _ in range(6)))


class StochasticDepth(Residual):
    """A residual branch dropped for some samples of the batch."""

    def forward(self, x: Tensor) -> Tensor:
        keep = torch.bernoulli(torch.full((len(x), 1), 0.8, device=x.device))
        return x + keep * self.body(x)


@case("loss_inside", "random", "layernorm")
def stochastic_depth() -> Built:
    return classifier(*(StochasticDepth(nn.LayerNorm(WIDTH), linear(nn.GELU())) for _ in range(6)))


class DiscreteCode(nn.Module):
    """Layers that choose one of eight codes by Gumbel noise, soft or with a straight-through estimate."""

    def __init__(self):
        super().__init__()
        self.logits = nn.ModuleList(nn.Linear(WIDTH, 8) for _ in range(6))
        self.codes = nn.ParameterList(nn.Parameter(torch.randn(8, WIDTH)) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for i, (logits, codes) in enumerate(zip(self.logits, self.codes, strict=True)):
            x = torch.tanh(x + functional.gumbel_softmax(logits(x), tau=0.7, hard=i % 2 == 1) @ codes)
        return x


@case("loss_inside", "random")
def gumbel_codes() -> Built:
    return classifier(DiscreteCode())


class Diffusion(nn.Module):
    """A denoiser that draws its own time and noise: all the randomness comes before the layers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(Residual(nn.LayerNorm(WIDTH), linear(nn.SiLU())) for _ in range(6)))

    def forward(self, x: Tensor) -> Tensor:
        time, eps = torch.rand(len(x), 1, device=x.device), torch.randn_like(x)
        noisy = (1 - time).sqrt() * x + time.sqrt() * eps
        return functional.mse_loss(self.layers(noisy), eps)


@case("loss_inside", "random", "layernorm")
def diffusion() -> Built:
    return Diffusion(), (torch.randn(1024, WIDTH),), {}


class Variational(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(*(linear(nn.ReLU()) for _ in range(4)), nn.Linear(WIDTH, 16))
        self.decoder = nn.Sequential(nn.Linear(8, WIDTH), *(linear(nn.ReLU()) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        mean, log_variance = self.encoder(x).chunk(2, dim=-1)
        code = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        divergence = 0.5 * (mean**2 + log_variance.exp() - 1 - log_variance).mean()
        return functional.mse_loss(self.decoder(code), x) + 0.1 * divergence


@case("loss_inside", "random")
def variational_autoencoder() -> Built:
    return Variational(), (torch.randn(1024, WIDTH),), {}


class TokenDrop(nn.Module):
    """Random tokens become padding, a random permutation shuffles the batch between layers."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(64, WIDTH, padding_idx=0)
        self.layers = nn.ModuleList(linear(nn.GELU()) for _ in range(6))
        self.head = nn.Linear(WIDTH, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(torch.where(torch.rand(tokens.shape, device=tokens.device) < 0.15, 0, tokens))
        for layer in self.layers:
            x = layer(x) + 0.1 * x[torch.randperm(len(x), device=x.device)]
        return functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


@case("loss_inside", "random")
def token_drop() -> Built:
    return TokenDrop(), (labels(32, 32, classes=64),), {}
