"""Let the optimizer step inside of the backward: the gradients of the model are never there at once.

python examples/step_in_backward.py
"""

import torch
from torch import nn

import lowtide


class Net(nn.Module):
    """A network with more parameters than activations, as when one fine-tunes on short texts."""

    def __init__(self, width: int = 256, depth: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.square().mean()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    for _ in range(3):
        loss = model(x)
        loss.backward()
        optimizer.step()  # finds no gradients where they were used up inside of the backward
        optimizer.zero_grad()


def main() -> None:
    x = torch.randn(16, 256)
    weights = []
    for inside in (False, True):
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        lowtide.cap(model, "min", optimizer=optimizer, step_in_backward=inside)
        train(model, optimizer, x)
        weights.append([parameter.detach().clone() for parameter in model.parameters()])
        plan = lowtide.plan_of(model)
        assert plan is not None
        print(f"step_in_backward={inside}: smallest peak {plan.peak}, gradients {plan.gradient_bytes} bytes")
    same = all(map(torch.equal, *weights))
    print(f"weights after three steps are the same bits: {same}")

    print(lowtide.verify(lowtide.uncap(model), x, budget="min", optimizer=optimizer, step_in_backward=True))


if __name__ == "__main__":
    main()
