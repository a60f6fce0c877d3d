"""What real code does besides layers: mutation, buffers, indexing, complex numbers, its own autograd."""

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from .case import Built, Residual, Supervised, case, labels
from .dense import BATCH, WIDTH, classifier, layers


class InPlace(nn.Module):
    """A block that writes into its own intermediate results in every common way."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.b = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x).relu_()
        y = y.clone().masked_fill_(x > 1.5, 0.1).add_(x)
        z = self.b(y)
        z[:, :8] = 0.5 * z[:, 8:16]
        z[:, 16:].mul_(0.9).add_(y[:, 16:], alpha=0.1)
        z.t()[3] += 1.0
        return z.clamp_(-4, 4)


@case("loss_inside", "inplace")
def in_place() -> Built:
    return classifier(*(InPlace() for _ in range(6)))


class FilledOutput(nn.Module):
    """Results gathered into one preallocated tensor, slice by slice."""

    def __init__(self):
        super().__init__()
        self.steps = nn.ModuleList(layers(8, act=nn.Tanh))

    def forward(self, x: Tensor) -> Tensor:
        out = torch.empty(len(self.steps), *x.shape, dtype=x.dtype, device=x.device)
        for i, step in enumerate(self.steps):
            x = step(x)
            out[i] = x
        return out.mean(0)


@case("loss_inside", "inplace")
def filled_output() -> Built:
    return classifier(FilledOutput())


class Centered(nn.Module):
    """Subtracts a running mean that this very call has updated, and divides by a count of the calls."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        self.calls += 1
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return torch.tanh((x - self.mean) * (1 + 1 / self.calls))


@case("loss_inside", "buffer", "mutates", "inplace", "mincut_wrong")
def running_mean() -> Built:
    return classifier(*(Centered() for _ in range(6)))


class Rebound(Centered):
    """The same, but the buffers are replaced by new tensors instead of being written to."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        self.calls = self.calls + 1
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return torch.tanh((x - self.mean) * (1 + 1 / self.calls))


@case("loss_inside", "buffer", "mutates")
def rebound_buffer() -> Built:
    return classifier(*(Rebound() for _ in range(6)))


class Warmup(Centered):
    """Reads its buffers, then writes to them: the backward needs what they were."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        y = torch.tanh((x - self.mean) * (2 - torch.exp(-self.calls)))
        self.calls += 1
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return y


@case("loss_inside", "buffer", "mutates", "inplace", "mincut_wrong")
def read_then_written_buffer() -> Built:
    return classifier(*(Warmup() for _ in range(6)))


class Standardised(nn.Module):
    """Normalises the batch it is given in place, after its first layers have read it."""

    def __init__(self):
        super().__init__()
        self.raw = nn.Sequential(*layers(4))
        self.standard = nn.Sequential(*layers(4))

    def forward(self, x: Tensor) -> Tensor:
        raw = self.raw(x.square())
        x.sub_(x.mean(0)).div_(x.std(0) + 1)
        return raw + self.standard(x)


@case("loss_inside", "inplace", "mutates_input")
def standardised_input() -> Built:
    return classifier(Standardised())


class SharedNorm(nn.Module):
    """One BatchNorm applied after every layer: its statistics are updated six times a step."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(layers(6))
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.norm(layer(x))
        return x


@case("loss_inside", "batchnorm", "buffer", "mutates", "tied")
def shared_batchnorm() -> Built:
    return classifier(SharedNorm())


class CodeBook(nn.Module):
    """Vector quantisation: nearest code, straight-through gradient, codes moved by a running average."""

    def __init__(self):
        super().__init__()
        self.before = nn.Sequential(*layers(4))
        self.after = nn.Sequential(*layers(4))
        self.register_buffer("codes", torch.randn(16, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        nearest = torch.cdist(x, self.codes).argmin(-1)
        self.codes.lerp_(torch.zeros_like(self.codes).index_add(0, nearest, x.detach()) / len(x), 0.1)
        return self.after(x + (self.codes[nearest] - x).detach())


@case("loss_inside", "buffer", "mutates", "inplace")
def code_book() -> Built:
    return classifier(CodeBook())


class Teacher(nn.Module):
    """A student that learns from a frozen copy evaluated without gradients."""

    def __init__(self):
        super().__init__()
        self.student = nn.Sequential(*layers(6))
        self.teacher = nn.Sequential(*layers(6)).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            goal = self.teacher(x)
        return functional.kl_div(
            self.student(x).log_softmax(-1), goal.log_softmax(-1), None, None, "batchmean", True
        )


@case("loss_inside", "frozen")
def distillation() -> Built:
    return Teacher(), (torch.randn(BATCH, WIDTH),), {}


class Bags(nn.Module):
    """Sums of word vectors with padding, beside means over bags."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(48, WIDTH, padding_idx=0)
        self.bags = nn.EmbeddingBag(48, WIDTH, mode="mean")
        self.layers = nn.Sequential(*layers(6, act=nn.GELU))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.layers(self.words(tokens).sum(1) + self.bags(tokens))


@case("loss_inside", "embedding")
def embedding_bags() -> Built:
    return (
        Supervised(Bags(), functional.cross_entropy),
        (labels(512, 12, classes=48), labels(512, classes=WIDTH)),
        {},
    )


class Indexing(nn.Module):
    """Linear attention by running sums and einsum, followed by sorting, gathering and scattering."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q, k = functional.elu(q) + 1, functional.elu(k) + 1
        memory = torch.einsum("btd,bte->btde", k, v).cumsum(1)
        scale = torch.einsum("btd,btd->bt", q, k.cumsum(1)).clamp_min(1e-3)
        y = torch.einsum("btd,btde->bte", q, memory) / scale[..., None]
        order = y.norm(dim=-1).argsort(dim=1)[..., None].expand_as(y)
        ranked = y.gather(1, order).cumsum(1) / y.shape[1]
        return x + torch.zeros_like(y).scatter_add(1, order, ranked) + torch.roll(y, 1, dims=1)


@case("loss_inside", "indexing")
def cumsum_einsum_gather() -> Built:
    x = torch.randn(8, 24, 16)
    return (
        Supervised(nn.Sequential(*(Indexing() for _ in range(6))), functional.mse_loss),
        (x, x.roll(1, 1)),
        {},
    )


class Spectral(nn.Module):
    """A Fourier layer: complex weights on the lowest frequencies, the rest is cut."""

    def __init__(self, channels: int, modes: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(channels, channels, modes, dtype=torch.cfloat) / channels)
        self.local = nn.Conv1d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        modes = self.weight.shape[-1]
        low = torch.einsum("bim,iom->bom", torch.fft.rfft(x)[..., :modes], self.weight)
        return functional.gelu(torch.fft.irfft(low, n=x.shape[-1]) + self.local(x))


@case("loss_inside", "complex", "conv")
def fourier() -> Built:
    x = torch.randn(16, 8, 64)
    return (
        Supervised(nn.Sequential(*(Spectral(8, 12) for _ in range(6))), functional.mse_loss),
        (x, x.roll(1, -1)),
        {},
    )


class Swish(torch.autograd.Function):
    """`x * sigmoid(x)` that keeps only `x`."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate = torch.sigmoid(x)
        return grad * gate * (1 + x * (1 - gate))


class CustomFunction(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Swish.apply(x)


@case("loss_inside", "autograd_function")
def custom_function() -> Built:
    return classifier(*layers(act=CustomFunction))


class Checkpointed(Residual):
    """A block the user already recomputes by hand."""

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.body, x, use_reentrant=False)


@case("loss_inside", "checkpoint")
def user_checkpoint() -> Built:
    return classifier(*(Checkpointed(*layers(2, act=nn.GELU)) for _ in range(6)))


class Penalised(nn.Module):
    """Losses at several depths, weight norms among them, and a branch whose result is unused."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(layers(8, act=nn.Mish))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        total = 1e-3 * sum(p.square().sum() for p in self.parameters())
        for i, layer in enumerate(self.layers):
            x = layer(x)
            unused = x.exp().sum()
            total = total + functional.cross_entropy(x, target) / (i + 1)
        del unused
        return total


@case("loss_inside")
def deep_supervision() -> Built:
    return Penalised(), (torch.randn(BATCH, WIDTH), labels(BATCH, classes=WIDTH)), {}


@case("loss_inside", "weight_norm")
def weight_norm() -> Built:
    parametrize = nn.utils.parametrizations.weight_norm
    return classifier(*(nn.Sequential(parametrize(nn.Linear(WIDTH, WIDTH)), nn.Softsign()) for _ in range(6)))


class NormedOverTime(nn.Module):
    """BatchNorm over the channels of (batch, time, channels), as in PatchTST: a transposed input."""

    def __init__(self):
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for linear, norm in zip(self.linears, self.norms, strict=True):
            x = linear(norm(x.transpose(1, 2)).transpose(1, 2)).relu()
        return x.square().mean()


@case("loss_inside", "batchnorm", "buffer", "mutates", "views")
def batchnorm_over_time() -> Built:
    return NormedOverTime(), (torch.randn(BATCH, 6, WIDTH),), {}


class Queue(nn.Module):
    """Momentum contrast: the keys of a batch replace the oldest ones of a queue, which is a buffer."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(*layers(2))
        self.register_buffer("queue", torch.randn(WIDTH, 4 * BATCH))

    def forward(self, x: Tensor) -> Tensor:
        keys = self.encoder(x)
        loss = (keys @ self.queue.clone().detach()).logsumexp(1).mean()
        with torch.no_grad():
            self.queue[:, : len(x)] = keys.detach().t()
        return loss


@case("loss_inside", "buffer", "mutates", "inplace")
def queue_of_keys() -> Built:
    return Queue(), (torch.randn(BATCH, WIDTH),), {}


class TwoHeads(nn.Module):
    """A head whose output is not in the loss: its weights are there, and the step does not touch them."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(*layers(4))
        self.used, self.unused = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        self.unused(x)
        return self.used(x).square().mean()


@case("loss_inside", "frozen")
def head_without_a_loss() -> Built:
    return TwoHeads(), (torch.randn(BATCH, WIDTH),), {}


class Rotated(nn.Module):
    """Complex numbers times a number of Python, whose conjugate the backward needs."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(layers(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            x = (torch.complex(x, x.sin()) * (0.8 + 0.6j)).abs()
        return x.mean()


@case("loss_inside", "complex")
def complex_number() -> Built:
    return Rotated(), (torch.randn(BATCH, WIDTH),), {}
