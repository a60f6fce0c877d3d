"""Train with Lightning under a cap: one callback more than without.

python examples/lightning_trainer.py
"""

import tempfile

import lightning
import torch
from torch import nn

import lowtide


class Classifier(lightning.LightningModule):
    """A network as Lightning's users write it: nothing in it knows of Lowtide."""

    def __init__(self, width: int = 256, depth: int = 8) -> None:
        super().__init__()
        layers = [part for _ in range(depth) for part in (nn.Linear(width, width), nn.GELU())]
        self.net = nn.Sequential(*layers, nn.Linear(width, 10))

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        loss = nn.functional.cross_entropy(logits, y)
        self.log("loss", loss)
        self.log("accuracy", (logits.argmax(1) == y).float().mean())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def make_data(rows: int = 4096, width: int = 256) -> torch.utils.data.DataLoader:
    x = torch.randn(rows, width)
    y = x[:, :10].argmax(1)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=1024)


def main() -> None:
    lightning.seed_everything(0)
    cap = lowtide.integrations.lightning.Cap("70%")
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            max_epochs=2,
            accelerator="cpu",
            callbacks=[cap],  # the line
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
        )
        trainer.fit(Classifier(), make_data())
    plan = cap.plan
    assert plan is not None
    assert cap.measured is not None
    print(f"uncapped, the peak of a step is {plan.uncapped.peak / 2**20:.1f} MiB")
    print(f"capped, it is {plan.peak / 2**20:.1f} MiB, measured {cap.measured / 2**20:.1f} MiB")
    print(f"accuracy {trainer.callback_metrics['accuracy']:.3f}, {plan.extra:.1%} more time as predicted")


if __name__ == "__main__":
    main()
