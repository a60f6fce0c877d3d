"""Train a sharded model under one cap: `fully_shard` per block, then on the model, then `cap`.

torchrun --nproc_per_node 2 examples/fsdp2.py

The budget is that of each device. Without torchrun it runs as one process. On GPUs, write "nccl".
"""

import os

import torch
from torch import distributed
from torch.distributed.fsdp import fully_shard

import lowtide


class Block(torch.nn.Module):
    """A norm and two layers around a nonlinearity, beside what came in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Model(torch.nn.Module):
    """Words in, a loss out; the embedding and the head are the root's own."""

    def __init__(self, words: int = 100, width: int = 64, blocks: int = 6) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(words, width)
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = torch.nn.Linear(width, words)

    def forward(self, words: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        return torch.nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def sharded_model() -> Model:
    torch.manual_seed(0)
    model = Model()
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def train(model: Model, steps: int = 3) -> int:
    """The peak of the last step on this device."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(distributed.get_rank())
    for _ in range(steps):
        batch = torch.randint(100, (16, 64))
        peak = lowtide.measure(lambda batch=batch: model(batch, batch).backward()).peak
        optimizer.step()
        optimizer.zero_grad()
    return peak


def main() -> None:
    alone = {} if "RANK" in os.environ else {"store": distributed.HashStore(), "rank": 0, "world_size": 1}
    distributed.init_process_group("gloo", **alone)
    plain = train(sharded_model())
    model = lowtide.cap(sharded_model(), plain // 2)
    capped = train(model)
    if distributed.get_rank() == 0:
        print(f"peak on each device: {plain / 2**20:.1f} MiB, capped {capped / 2**20:.1f} MiB")
        print(lowtide.plan_of(model))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
