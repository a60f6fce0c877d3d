"""Language models of the benchmarks, written from their papers; each takes a batch and gives its loss."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class GPTBlock(nn.Module):
    """A pre-norm transformer block, causal or not; dropout, if any, is on what each half adds."""

    def __init__(self, width: int, heads: int, *, causal: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.drop(self.proj(y.transpose(1, 2).reshape(batch, length, width)))
        return x + self.drop(self.mlp(self.norm2(x)))

    def mlp(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class GPT(nn.Module):
    """A language model with its loss; `tied` shares the embedding with the head, as GPT-2 does."""

    def __init__(
        self,
        layers: int,
        width: int,
        vocabulary: int,
        length: int,
        *,
        dropout: float = 0.0,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.drop = nn.Dropout(dropout) if dropout else nn.Identity()
        blocks = (GPTBlock(width, width // 64, dropout=dropout) for _ in range(layers))
        self.blocks = nn.Sequential(*blocks)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.drop(self.tokens(tokens) + self.places.weight[: tokens.shape[1]])
        return next_token_loss(self.head(self.norm(self.blocks(x))), targets)


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class RMSNorm(nn.Module):
    """A norm without mean or bias, computed in single precision (Zhang and Sennrich 2019)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.weight * (wide * scale).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary places: pairs of channels turned by an angle of the place (Su et al. 2021)."""
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin


class LlamaBlock(nn.Module):
    """Grouped-query attention with rotary places, and a gated MLP (Touvron et al. 2023)."""

    def __init__(self, width: int, heads: int, groups: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, groups * self.size, bias=False)
        self.v = nn.Linear(width, groups * self.size, bias=False)
        self.proj = nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))

    def attention(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q = rotate(self.split(self.q(x), self.heads), cos, sin)
        k = rotate(self.split(self.k(x), self.groups), cos, sin)
        v = self.split(self.v(x), self.groups)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.proj(y.transpose(1, 2).flatten(2))

    def split(self, x: Tensor, heads: int) -> Tensor:
        return x.unflatten(-1, (heads, self.size)).transpose(1, 2)


class Llama(nn.Module):
    """A language model of Llama's kind with its loss, in bf16, the head tied and the loss in fp32."""

    def __init__(
        self, layers: int, width: int, vocabulary: int, *, heads: int, groups: int, hidden: int
    ) -> None:
        super().__init__()
        self.size = width // heads
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(LlamaBlock(width, heads, groups, hidden) for _ in range(layers))
        self.norm, self.head = RMSNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        self.to(torch.bfloat16)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        cos, sin = self.angles(tokens)
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        return next_token_loss(self.head(self.norm(x)).float(), targets)

    def angles(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        pairs = torch.arange(0, self.size, 2, device=tokens.device)
        turns = torch.outer(places, 500_000.0 ** (-pairs / self.size)).repeat(1, 2)
        return turns.cos().to(torch.bfloat16), turns.sin().to(torch.bfloat16)


class Experts(nn.Module):
    """The two best of several MLPs per token, each of bounded capacity (GShard, Lepikhin et al. 2020).

    Tokens go to the experts and back by dense products with a mask, so no shape depends on the routing.
    """

    def __init__(self, width: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.experts = experts
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.empty(experts, width, hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, width))

    def forward(self, x: Tensor) -> Tensor:
        capacity = 5 * x.shape[1] // (2 * self.experts)
        weights = self.places(self.router(x).float().softmax(-1), capacity).to(x.dtype)
        queue = torch.einsum("gsec,gsd->egcd", (weights > 0).to(x.dtype), x)
        hidden = F.gelu(torch.einsum("egcd,edh->egch", queue, self.up))
        done = torch.einsum("egch,ehd->egcd", hidden, self.down)
        return torch.einsum("gsec,egcd->gsd", weights, done)

    def places(self, gates: Tensor, capacity: int) -> Tensor:
        """The weight of each token in each place of each expert's queue; the first choices queue first."""
        weight, chosen = gates.topk(2, -1)
        weight = weight / weight.sum(-1, keepdim=True)
        first, second = F.one_hot(chosen, self.experts).unbind(2)
        ranks = first.cumsum(1) - 1, second.cumsum(1) - 1 + first.sum(1, keepdim=True)
        total = torch.zeros((), device=gates.device)
        for choice, mask, rank in zip(weight.unbind(2), (first, second), ranks, strict=True):
            kept = mask * (rank < capacity)
            slot = F.one_hot((rank * kept).sum(-1), capacity)
            total = total + choice[..., None, None] * (kept[..., None] * slot[:, :, None])
        return total


class ExpertBlock(GPTBlock):
    """A transformer block with a mixture of experts in place of its MLP."""

    def __init__(self, width: int, heads: int, experts: int) -> None:
        super().__init__(width, heads)
        del self.up, self.down
        self.experts = Experts(width, 4 * width, experts)

    def mlp(self, x: Tensor) -> Tensor:
        return self.experts(x)


def moe(layers: int, width: int, vocabulary: int, length: int, *, experts: int) -> nn.Module:
    """A GPT in bf16, every second block of which has a mixture of experts."""
    model = GPT(layers, width, vocabulary, length)
    for index in range(1, layers, 2):
        model.blocks[index] = ExpertBlock(width, width // 64, experts)
    return model.to(torch.bfloat16)


def tokens(batch: int, length: int, vocabulary: int, device: str) -> tuple[Tensor, Tensor]:
    ids = torch.randint(vocabulary, (batch, length + 1), device=device)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
