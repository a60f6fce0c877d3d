"""Transformers written out: decoders, encoders, both, vision, mixtures of experts."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from .case import Built, Supervised, case, labels

WIDTH, HEADS, DEPTH, VOCAB, BATCH, TIME = 32, 4, 4, 64, 8, 32


def split_heads(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def join_heads(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def language(model: nn.Module) -> Built:
    tokens = labels(BATCH, TIME + 1, classes=VOCAB)
    return model, (tokens[:, :-1], tokens[:, 1:]), {}


class SelfAttention(nn.Module):
    def __init__(self, *, causal: bool, dropout: float = 0.0):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.causal = causal
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(y, HEADS) for y in self.qkv(x).chunk(3, dim=-1))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal, dropout_p=self.dropout)
        return functional.dropout(self.out(join_heads(y)), self.dropout)


class ExplicitAttention(SelfAttention):
    """The same by matrix products and a softmax over a masked score."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(y, HEADS) for y in self.qkv(x).chunk(3, dim=-1))
        score = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        return self.out(join_heads(score.masked_fill(future, float("-inf")).softmax(-1) @ v))


class MaskedAttention(SelfAttention):
    """Fused attention under a boolean mask: a sliding window."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(y, HEADS) for y in self.qkv(x).chunk(3, dim=-1))
        t = torch.arange(x.shape[1], device=x.device)
        age = t[:, None] - t
        return self.out(
            join_heads(functional.scaled_dot_product_attention(q, k, v, attn_mask=(age >= 0) & (age < 8)))
        )


def feed_forward(dropout: float = 0.0) -> nn.Sequential:
    tail = [nn.Dropout(dropout)] if dropout else []
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), *tail)


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, attention: nn.Module, mlp: nn.Module, norm: type[nn.Module] = nn.LayerNorm):
        super().__init__()
        self.norms = nn.ModuleList(norm(WIDTH) for _ in range(2))
        self.attention = attention
        self.mlp = mlp

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class Decoder(nn.Module):
    """A language model with tied embeddings over the given blocks."""

    def __init__(self, *blocks: nn.Module, dropout: float = 0.0, positions: bool = True):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.position = nn.Embedding(TIME, WIDTH) if positions else None
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        x = self.embed(tokens)
        if self.position is not None:
            x = x + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        x = self.dropout(x) if self.dropout.p else x
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), target.flatten())


def gpt_of(attention: type[SelfAttention]) -> Built:
    return language(Decoder(*(Block(attention(causal=True), feed_forward()) for _ in range(DEPTH))))


@case("loss_inside", "sdpa", "tied", "layernorm")
def gpt() -> Built:
    return gpt_of(SelfAttention)


@case("loss_inside", "tied", "layernorm")
def gpt_explicit_softmax() -> Built:
    return gpt_of(ExplicitAttention)


@case("loss_inside", "sdpa", "tied", "layernorm")
def gpt_sliding_window() -> Built:
    return gpt_of(MaskedAttention)


@case("loss_inside", "sdpa", "tied", "layernorm", "dropout", "random")
def gpt_dropout() -> Built:
    p = 0.1
    blocks = (Block(SelfAttention(causal=True, dropout=p), feed_forward(p)) for _ in range(DEPTH))
    return language(Decoder(*blocks, dropout=p))


def rotate(x: Tensor) -> Tensor:
    """Rotary position embedding of `(batch, heads, time, dim)`."""
    half = x.shape[-1] // 2
    rate = 10000.0 ** (-torch.arange(half, device=x.device) / half)
    angle = torch.arange(x.shape[-2], device=x.device)[:, None] * rate
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], dim=-1)


class GroupedAttention(nn.Module):
    """Rotary attention where two query heads share a key-value head."""

    def __init__(self):
        super().__init__()
        self.q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.kv = nn.Linear(WIDTH, WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q = split_heads(self.q(x), HEADS)
        k, v = (split_heads(y, HEADS // 2) for y in self.kv(x).chunk(2, dim=-1))
        q, k = rotate(q), rotate(k)
        return self.out(
            join_heads(functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))
        )


class SwiGLU(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.up(x).chunk(2, dim=-1)
        return self.down(functional.silu(a) * b)


@case("loss_inside", "sdpa", "tied")
def llama() -> Built:
    blocks = (Block(GroupedAttention(), SwiGLU(), nn.RMSNorm) for _ in range(DEPTH))
    return language(Decoder(*blocks, positions=False))


class BiasedAttention(nn.Module):
    """Attention of `x` to `memory` with a learnt bias, if any."""

    def __init__(self):
        super().__init__()
        self.q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.kv = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, memory: Tensor, bias: Tensor | None) -> Tensor:
        q = split_heads(self.q(x), HEADS)
        k, v = (split_heads(y, HEADS) for y in self.kv(memory).chunk(2, dim=-1))
        return self.out(
            join_heads(functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1.0))
        )


class RelativeBias(nn.Module):
    """One bias per head and clipped distance, shared by all the layers of a stack."""

    def __init__(self, reach: int, *, causal: bool):
        super().__init__()
        self.table = nn.Embedding(2 * reach + 1, HEADS)
        self.reach = reach
        self.causal = causal

    def forward(self, time: int) -> Tensor:
        t = torch.arange(time, device=self.table.weight.device)
        distance = t - t[:, None]
        bias = self.table(distance.clamp(-self.reach, self.reach) + self.reach).permute(2, 0, 1)
        return bias.masked_fill(distance > 0, float("-inf")) if self.causal else bias


class CrossBlock(nn.Module):
    """A block of an encoder, or of a decoder when it is given a memory."""

    def __init__(self, *, cross: bool):
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2 + cross))
        self.own = BiasedAttention()
        self.cross = BiasedAttention() if cross else None
        self.mlp = feed_forward()

    def forward(self, x: Tensor, bias: Tensor, memory: Tensor | None = None) -> Tensor:
        y = self.norms[0](x)
        x = x + self.own(y, y, bias)
        if self.cross is not None:
            x = x + self.cross(self.norms[2](x), memory, None)
        return x + self.mlp(self.norms[1](x))


class EncoderDecoder(nn.Module):
    def __init__(self, depth: int):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.encoder_bias = RelativeBias(8, causal=False)
        self.decoder_bias = RelativeBias(8, causal=True)
        self.encoder = nn.ModuleList(CrossBlock(cross=False) for _ in range(depth))
        self.decoder = nn.ModuleList(CrossBlock(cross=True) for _ in range(depth))

    def forward(self, source: Tensor, tokens: Tensor, target: Tensor) -> Tensor:
        memory, bias = self.embed(source), self.encoder_bias(source.shape[1])
        for block in self.encoder:
            memory = block(memory, bias)
        x, bias = self.embed(tokens), self.decoder_bias(tokens.shape[1])
        for block in self.decoder:
            x = block(x, bias, memory)
        return functional.cross_entropy((x @ self.embed.weight.T).flatten(0, 1), target.flatten())


@case("loss_inside", "sdpa", "tied")
def t5() -> Built:
    tokens = labels(BATCH, 25, classes=VOCAB)
    return EncoderDecoder(2), (labels(BATCH, TIME, classes=VOCAB), tokens[:, :-1], tokens[:, 1:]), {}


class VisionTransformer(nn.Module):
    def __init__(self, patches: int):
        super().__init__()
        self.patch = nn.Conv2d(3, WIDTH, 4, stride=4)
        self.first = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.position = nn.Parameter(0.02 * torch.randn(1, patches + 1, WIDTH))
        self.blocks = nn.Sequential(
            *(Block(SelfAttention(causal=False), feed_forward()) for _ in range(DEPTH)), nn.LayerNorm(WIDTH)
        )
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], dim=1) + self.position
        return self.head(self.blocks(x)[:, 0])


@case("loss_inside", "sdpa", "conv", "layernorm")
def vit() -> Built:
    batch = torch.randn(BATCH, 3, 24, 24), labels(BATCH, classes=10)
    return Supervised(VisionTransformer(36), functional.cross_entropy), batch, {}


@case("loss_inside", "sdpa", "layernorm", "dropout", "random")
def torch_encoder_layers() -> Built:
    layers = (
        nn.TransformerEncoderLayer(
            WIDTH, HEADS, 2 * WIDTH, dropout=0.1, batch_first=True, norm_first=i % 2 == 0
        )
        for i in range(DEPTH)
    )
    x = torch.randn(BATCH, TIME, WIDTH)
    return Supervised(nn.Sequential(*layers), functional.mse_loss), (x, torch.randn_like(x)), {}
