"""Loops over time, unrolled by Python."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from .case import Built, case, labels

VOCAB, WIDTH, BATCH, TIME = 32, 32, 128, 6


class CellLoop(nn.Module):
    """A stack of two recurrent cells over a sequence, with a loss at every step."""

    def __init__(self, cell: type[nn.RNNCellBase], width: int = WIDTH):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.cells = nn.ModuleList(cell(width, width) for _ in range(2))
        self.out = nn.Linear(width, VOCAB)

    def step(self, x: Tensor, states: list) -> Tensor:
        for i, cell in enumerate(self.cells):
            states[i] = cell(x, states[i])
            x = states[i][0] if isinstance(cell, nn.LSTMCell) else states[i]
        return x

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        states = [None for _ in self.cells]
        steps = [self.step(x, states) for x in self.embed(tokens).unbind(1)]
        return functional.cross_entropy(self.out(torch.stack(steps, 1)).flatten(0, 1), target.flatten())


def sequences(model: nn.Module, *, batch: int = BATCH, time: int = TIME) -> Built:
    tokens = labels(batch, time + 1, classes=VOCAB)
    return model, (tokens[:, :-1], tokens[:, 1:]), {}


@case("loss_inside", "recurrent")
def lstm_cells() -> Built:
    return sequences(CellLoop(nn.LSTMCell))


@case("loss_inside", "recurrent")
def gru_cells() -> Built:
    return sequences(CellLoop(nn.GRUCell))


@case("loss_inside", "recurrent", "aot_rounds")
def gru_cells_odd_width() -> Built:
    """A sigmoid rounds differently in the tail of a vector: in place on a slice, or on a packed copy."""
    return sequences(CellLoop(nn.GRUCell, width=24))


@case("loss_inside", "recurrent")
def rnn_cells() -> Built:
    return sequences(CellLoop(nn.RNNCell))


class SelectiveScan(nn.Module):
    """A state-space layer whose decay, input and output maps depend on the input, scanned step by step."""

    def __init__(self, width: int, state: int):
        super().__init__()
        self.gates = nn.Linear(width, 2 * width)
        self.maps = nn.Linear(width, 2 * state + width)
        self.log_decay = nn.Parameter(torch.rand(width, state))
        self.split = (state, state, width)

    def forward(self, x: Tensor) -> Tensor:
        u, gate = self.gates(x).chunk(2, dim=-1)
        b, c, delta = self.maps(u).split(self.split, dim=-1)
        delta = functional.softplus(delta).unsqueeze(-1)
        decay = torch.exp(-delta * self.log_decay.exp())
        drive = delta * b.unsqueeze(2) * u.unsqueeze(-1)
        state, steps = torch.zeros_like(drive[:, 0]), []
        for t in range(x.shape[1]):
            state = decay[:, t] * state + drive[:, t]
            steps.append((state * c[:, t].unsqueeze(1)).sum(-1))
        return x + torch.stack(steps, dim=1) * functional.silu(gate)


class ScanModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 16)
        self.layers = nn.ModuleList(SelectiveScan(16, 4) for _ in range(3))

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy((x @ self.embed.weight.T).flatten(0, 1), target.flatten())


@case("loss_inside", "recurrent", "tied")
def selective_scan() -> Built:
    return sequences(ScanModel(), batch=32)
