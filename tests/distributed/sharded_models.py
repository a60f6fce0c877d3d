"""Small sharded models, and the training loop that is run with and without a cap on each rank."""

from functools import partial

import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, gelu

import lowtide


class Block(torch.nn.Module):
    def __init__(self, width, dropout=0.1):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, width)
        self.dropout = torch.nn.Dropout(dropout)

    def forward(self, x, scale=None):
        y = self.dropout(self.down(gelu(self.up(self.norm(x)))))
        return x + (y if scale is None else scale * y)


class Model(torch.nn.Module):
    """A language model in miniature: the root has an embedding, a norm and a head of its own."""

    def __init__(self, words=40, width=32, blocks=4, *, tied=False, loss=True, scaled=False):
        super().__init__()
        self.embed = torch.nn.Embedding(words, width)
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm = torch.nn.LayerNorm(width)
        self.head = torch.nn.Linear(width, words, bias=False)
        self.register_buffer("scale", torch.full((width,), 0.5))
        if tied:
            self.head.weight = self.embed.weight
        self.loss = loss
        self.scaled = scaled

    def forward(self, words, targets=None):
        x = self.embed(words)
        for block in self.blocks:
            x = block(x, scale=self.scale) if self.scaled else block(x)
        logits = self.head(self.norm(x))
        return cross_entropy(logits.flatten(0, 1), targets.flatten()) if self.loss else logits


def shard(model, **options):
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def plain_step(model, batch, number):
    model(batch, batch).backward()


def train(
    make, budget, *, rank, steps=4, step=plain_step, sizes=(8,), length=32, optimizer=torch.optim.AdamW
):
    """Losses and weights after some steps, peaks of each, and the model; the same numbers each time."""
    torch.manual_seed(0)
    model = make()
    trained = optimizer(model.parameters(), 1e-2)
    if budget is not None:
        lowtide.cap(model, budget)
    found, peaks = [], []
    for number in range(steps):
        torch.manual_seed(100 * number + rank)
        batch = torch.randint(0, 40, (sizes[number % len(sizes)], length))
        state = [local(item) for each in trained.state.values() for item in each.values()]
        taken = lowtide.measure(partial(step, model, batch, number), device="cpu", resident=state)
        peaks.append(taken.peak)
        gradients = [parameter.grad for parameter in model.parameters()]
        found += [None if gradient is None else local(gradient).clone() for gradient in gradients]
        if all(gradient is not None for gradient in gradients):
            trained.step()
            trained.zero_grad()
    found += [local(parameter).detach().clone() for parameter in model.parameters()]
    found.append(torch.get_rng_state())
    return found, peaks, model


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def same(left, right):
    return len(left) == len(right) and all(map(_equal, left, right))


def _equal(left, right):
    return left is right if left is None or right is None else torch.equal(left, right)
