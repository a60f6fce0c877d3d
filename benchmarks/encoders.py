"""BERT and T5, written from their papers, and as the transformers library has them; each gives its loss."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from language import RMSNorm


class BertBlock(nn.Module):
    """A post-norm transformer block (Devlin et al. 2018); dropout is on what each half adds."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm1, self.norm2, self.drop = nn.LayerNorm(width), nn.LayerNorm(width), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = self.norm1(x + self.drop(self.proj(y)))
        return self.norm2(x + self.drop(self.down(F.gelu(self.up(x)))))


class Bert(nn.Module):
    """BERT and its masked language model loss: targets are -100 where no token was masked."""

    def __init__(
        self, layers: int = 12, width: int = 768, vocabulary: int = 30522, length: int = 512
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.segments = nn.Embedding(2, width)
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(0.1)
        self.blocks = nn.Sequential(*(BertBlock(width, width // 64) for _ in range(layers)))
        self.predict = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))
        self.head = nn.Linear(width, vocabulary)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, segments: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]] + self.segments(segments)
        logits = self.head(self.predict(self.blocks(self.drop(self.norm(x)))))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class RelativeBias(nn.Module):
    """A learnt number per head and distance between two places; far distances share buckets."""

    def __init__(self, heads: int, *, causal: bool, buckets: int = 32, farthest: int = 128) -> None:
        super().__init__()
        self.causal, self.buckets, self.farthest = causal, buckets, farthest
        self.table = nn.Embedding(buckets, heads)

    def forward(self, length: int) -> Tensor:
        places = torch.arange(length, device=self.table.weight.device)
        ahead = places[None] - places[:, None]
        bias = self.table(self.bucket(ahead)).permute(2, 0, 1)
        return bias.masked_fill(ahead > 0, -1e9) if self.causal else bias

    def bucket(self, ahead: Tensor) -> Tensor:
        buckets = self.buckets if self.causal else self.buckets // 2
        side = torch.zeros_like(ahead) if self.causal else (ahead > 0) * buckets
        distance = (-ahead).clamp(min=0) if self.causal else ahead.abs()
        near = buckets // 2
        share = torch.log(distance.clamp(min=1) / near) / math.log(self.farthest / near)
        far = (near + share * (buckets - near)).long().clamp(max=buckets - 1)
        return side + torch.where(distance < near, distance, far)


class T5Attention(nn.Module):
    """Attention without scaling; the scores are a tensor, as T5's were: they get a bias and dropout."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm, self.drop = heads, RMSNorm(width), nn.Dropout(0.1)
        self.q, self.k, self.v, self.proj = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor, bias: Tensor | None, memory: Tensor | None = None) -> Tensor:
        y = self.norm(x)
        read = y if memory is None else memory
        q, k, v = (self.split(part) for part in (self.q(y), self.k(read), self.v(read)))
        scores = q @ k.transpose(-1, -2)
        weights = self.drop((scores if bias is None else scores + bias).softmax(-1))
        return x + self.drop(self.proj((weights @ v).transpose(1, 2).flatten(2)))

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class T5Block(nn.Module):
    """Self-attention, attention to the encoder's output in a decoder, and a ReLU MLP."""

    def __init__(self, width: int, heads: int, *, decoder: bool) -> None:
        super().__init__()
        self.attend = T5Attention(width, heads)
        self.cross = T5Attention(width, heads) if decoder else None
        self.norm, self.drop = RMSNorm(width), nn.Dropout(0.1)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, bias: Tensor, memory: Tensor | None) -> Tensor:
        x = self.attend(x, bias)
        if self.cross is not None:
            x = self.cross(x, None, memory)
        return x + self.drop(self.down(self.drop(F.relu(self.up(self.norm(x))))))


class T5Stack(nn.Module):
    """The encoder or the decoder."""

    def __init__(self, layers: int, width: int, heads: int, *, decoder: bool) -> None:
        super().__init__()
        self.bias = RelativeBias(heads, causal=decoder)
        self.blocks = nn.ModuleList(T5Block(width, heads, decoder=decoder) for _ in range(layers))
        self.norm, self.drop = RMSNorm(width), nn.Dropout(0.1)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        x, bias = self.drop(x), self.bias(x.shape[1])
        for block in self.blocks:
            x = block(x, bias, memory)
        return self.drop(self.norm(x))


class T5(nn.Module):
    """Text to text, with its loss (Raffel et al. 2019); the defaults are T5-small."""

    def __init__(self, layers: int = 6, width: int = 512, vocabulary: int = 32128) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.encoder = T5Stack(layers, width, width // 64, decoder=False)
        self.decoder = T5Stack(layers, width, width // 64, decoder=True)

    def forward(self, source: Tensor, shifted: Tensor, targets: Tensor) -> Tensor:
        memory = self.encoder(self.tokens(source))
        x = self.decoder(self.tokens(shifted), memory)
        logits = F.linear(x * x.shape[-1] ** -0.5, self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Transformers(nn.Module):
    """A model of the transformers library without weights, and the loss it computes from labels."""

    def __init__(self, model: str, config: str, **options: Any) -> None:
        super().__init__()
        import transformers

        self.net = getattr(transformers, model)(getattr(transformers, config)(**options))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self.net(input_ids=tokens, labels=targets).loss


def token_batches(count: int, batch: int, length: int, vocabulary: int, device: str) -> tuple[Tensor, ...]:
    return tuple(torch.randint(vocabulary, (batch, length), device=device) for _ in range(count))
