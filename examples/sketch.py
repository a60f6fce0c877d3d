"""Let the linear layers of a small encoder keep a sketch of their inputs, and see what it costs.

python examples/sketch.py

A task that is made up: which of two halves of a sequence holds more of a token. The encoder is trained
exactly, with a tenth of the rows kept, and with all rows in four bits. Padding is left out of the sketches.
"""

import torch
from torch import nn

import lowtide

TOKENS, LENGTH, BATCH, WIDTH = 8, 16, 64, 64


class Encoder(nn.Module):
    """Two layers of a transformer, and the loss of a decision between two classes."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(TOKENS, WIDTH, 0), nn.Embedding(LENGTH, WIDTH)
        self.mix = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.up = nn.ModuleList(nn.Linear(WIDTH, 4 * WIDTH) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(4 * WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places.weight
        for mix, up, down in zip(self.mix, self.up, self.down, strict=True):
            y, bias = mix(x), torch.where(mask, 0.0, -torch.inf).view(-1, 1, 1, LENGTH)
            q = y.view(*ids.shape, 4, -1).transpose(1, 2)
            attended = nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=bias)
            x = nn.functional.layer_norm(x + attended.transpose(1, 2).flatten(2), (WIDTH,))
            x = nn.functional.layer_norm(x + down(nn.functional.gelu(up(x))), (WIDTH,))
        mean = (x * mask.unsqueeze(2)).sum(1) / mask.sum(1, keepdim=True)
        return nn.functional.cross_entropy(self.head(mean), labels)


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = torch.randint(1, TOKENS, (BATCH, LENGTH))
    mask = torch.arange(LENGTH) < torch.randint(LENGTH // 2, LENGTH + 1, (BATCH, 1))
    ids = ids * mask
    first, second = ((half == 1).sum(1) for half in ids.chunk(2, dim=1))
    return ids, mask, (first > second).long()


def train(model: nn.Module, steps: int) -> list[float]:
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        loss = model(*batch())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    for kind, rate in (("exact", None), ("strided", 0.1), ("int4", None)):
        torch.manual_seed(0)
        model, layers = Encoder(), ("mix", "up", "down")
        if kind == "strided":
            lowtide.sketch(model, rate, layers=layers, rows="mask")
        elif kind != "exact":
            lowtide.sketch(model, kind=kind, layers=layers)
        data = batch()
        if kind != "exact":
            print(f"\n{lowtide.noise(model, *data)}")
        peak = lowtide.measure(lambda model=model, data=data: model(*data).backward(), device="cpu").peak
        losses = train(model, 60)
        first, last = sum(losses[:10]) / 10, sum(losses[-10:]) / 10
        print(f"{kind}: peak {peak / 2**20:.1f} MiB, loss {first:.3f} at first and {last:.3f} at last")


if __name__ == "__main__":
    main()
