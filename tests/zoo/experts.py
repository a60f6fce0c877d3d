"""Mixtures of experts whose shapes do not depend on the routing."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from .attention import WIDTH, Block, Decoder, SelfAttention, feed_forward, language
from .case import Built, case

DEPTH, EXPERTS, TOP = 3, 4, 2


class DenseExperts(nn.Module):
    """Every expert sees every token; a gate that is zero outside the top two mixes them."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(feed_forward() for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        score, chosen = self.router(x).topk(TOP, dim=-1)
        gate = torch.zeros_like(x[..., :EXPERTS]).scatter(-1, chosen, score.softmax(-1))
        return sum(gate[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


class CapacityExperts(DenseExperts):
    """Each expert takes its first `capacity` tokens; the rest go to a slot that nobody reads."""

    def slots(self, chosen: Tensor, capacity: int) -> Tensor:
        rank = (functional.one_hot(chosen, EXPERTS).cumsum(0) - 1).gather(1, chosen[:, None]).squeeze(1)
        return torch.where(rank < capacity, chosen * capacity + rank, EXPERTS * capacity)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        score, chosen = self.router(tokens).topk(TOP, dim=-1)
        capacity = TOP * len(tokens) // EXPERTS
        slots = self.slots(chosen.flatten(), capacity)
        repeated = tokens.repeat_interleave(TOP, dim=0)
        queue = tokens.new_zeros(EXPERTS * capacity + 1, WIDTH).index_add(0, slots, repeated)
        parts = zip(self.experts, queue[:-1].chunk(EXPERTS), strict=True)
        done = torch.cat([*(expert(part) for expert, part in parts), queue[-1:] * 0])
        weighted = done[slots] * score.softmax(-1).flatten()[:, None]
        return weighted.unflatten(0, (-1, TOP)).sum(1).view_as(x)


def decoder_of(experts: type[DenseExperts]) -> Built:
    return language(Decoder(*(Block(SelfAttention(causal=True), experts()) for _ in range(DEPTH))))


@case("loss_inside", "moe", "sdpa", "tied", "layernorm")
def moe_dense() -> Built:
    return decoder_of(DenseExperts)


@case("loss_inside", "moe", "sdpa", "tied", "layernorm")
def moe_capacity() -> Built:
    return decoder_of(CapacityExperts)
