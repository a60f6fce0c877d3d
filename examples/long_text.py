"""Train a character-level LSTM through very long texts, in the memory of a few dozen steps.

python examples/long_text.py [a text file] [characters per step]

Without a file the text is this program itself, over and over.
"""

import sys
from pathlib import Path

import torch
from torch import nn

import lowtide

BATCH, WIDTH = 8, 64


class CharCell(nn.Module):
    """Reads a character, goes on by one step, and gives the loss of the next character."""

    def __init__(self, letters: int) -> None:
        super().__init__()
        self.read = nn.Embedding(letters, WIDTH)
        self.lstm = nn.LSTMCell(WIDTH, WIDTH)
        self.write = nn.Linear(WIDTH, letters)

    def forward(self, carry, x):
        letter, following = x
        carry = self.lstm(self.read(letter), carry)
        return carry, nn.functional.cross_entropy(self.write(carry[0]), following)


def main(text: str, length: int) -> None:
    torch.manual_seed(0)
    letters = sorted(set(text))
    codes = torch.tensor([letters.index(letter) for letter in text])
    codes = codes.repeat(1 + BATCH * (length + 1) // len(codes))[: BATCH * (length + 1)]
    codes = codes.view(BATCH, length + 1).t()  # time comes first
    batch = codes[:-1], codes[1:]

    cell = CharCell(len(letters))
    start = torch.zeros(BATCH, WIDTH), torch.zeros(BATCH, WIDTH)
    plan = lowtide.scan_plan(cell, start, batch, budget="5%", reduce="mean")
    print(plan)
    optimizer = torch.optim.Adam(cell.parameters(), lr=3e-3)
    for step in range(3):
        _, loss = lowtide.scan(cell, start, batch, budget="5%", reduce="mean")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: {loss.item():.3f} nats per character, through {length} characters")


if __name__ == "__main__":
    arguments = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
    source = Path(arguments[0]) if arguments else Path(__file__)
    main(source.read_text(encoding="utf-8"), int(arguments[1]) if len(arguments) > 1 else 500)
