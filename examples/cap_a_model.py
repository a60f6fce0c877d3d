"""Train a small convolutional network under a cap, and see what it cost.

python examples/cap_a_model.py
"""

import torch
from torch import nn

import lowtide


def block(width: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())


class Net(nn.Module):
    """A network that gives its loss, so that the whole step is planned."""

    def __init__(self) -> None:
        super().__init__()
        blocks = (block(32) for _ in range(8))
        self.net = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten()
        )
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.net(x)), y)


def main() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(16, 3, 32, 32), torch.randint(10, (16,))
    model = Net()
    print(lowtide.verify(model, x, y, budget="50%"), end="\n\n")

    lowtide.cap(model, "50%")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}")
    print(lowtide.plan_of(model))


if __name__ == "__main__":
    main()
