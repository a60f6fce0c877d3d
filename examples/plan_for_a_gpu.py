"""What would a GPU that is not here need? Plan a transformer for it, at several budgets.

python examples/plan_for_a_gpu.py
"""

import torch
from torch import nn

import lowtide


class Encoder(nn.Module):
    """A stack of encoder layers with a mean-squared loss."""

    def __init__(self, layers: int = 4, width: int = 512) -> None:
        super().__init__()
        parts = [nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True) for _ in range(layers)]
        self.layers = nn.Sequential(*parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).pow(2).mean()


def main() -> None:
    model, x = Encoder(), torch.empty(32, 512, 512)
    vanilla = lowtide.plan(model, x, device="A100")
    print(f"uncapped peak {vanilla.peak / 2**20:8.0f} MiB")
    for share in (0.75, 0.5, 0.35):
        try:
            plan = lowtide.plan(model, x, device="A100", budget=int(vanilla.peak * share))
        except lowtide.BudgetTooSmall as error:
            print(f"budget {share:.0%}: the smallest peak is {error.smallest / 2**20:.0f} MiB")
            continue
        print(f"budget {share:.0%}: peak {plan.peak / 2**20:8.0f} MiB, {plan.extra:+.1%} time")


if __name__ == "__main__":
    main()
