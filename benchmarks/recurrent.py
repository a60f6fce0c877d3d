"""Networks that go through their sequence step by step, the steps written out; each gives its loss."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from language import RMSNorm, next_token_loss


class SelectiveScan(nn.Module):
    """A state-space mixer in the chunked form of Mamba-2 (Dao and Gu 2024, listing 1).

    Each head has a matrix of states that decays by a number that depends on the token. Inside a chunk all
    pairs of places are taken at once; the state is handed on from chunk to chunk.
    """

    def __init__(self, width: int, *, states: int = 128, head: int = 64, chunk: int = 256) -> None:
        super().__init__()
        inner = 2 * width
        self.heads, self.head, self.states, self.chunk = inner // head, head, states, chunk
        self.parts = [inner, inner + 2 * states, self.heads]
        self.enter = nn.Linear(width, sum(self.parts), bias=False)
        self.conv = nn.Conv1d(self.parts[1], self.parts[1], 4, padding=3, groups=self.parts[1])
        self.step = nn.Parameter(torch.zeros(self.heads))
        self.log_decay = nn.Parameter(torch.zeros(self.heads))
        self.skip = nn.Parameter(torch.ones(self.heads))
        self.norm, self.leave = RMSNorm(inner), nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, mixed, step = self.enter(x).split(self.parts, -1)
        mixed = F.silu(self.conv(mixed.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        values, write, read = mixed.split([self.parts[0], self.states, self.states], -1)
        values = values.unflatten(-1, (self.heads, self.head)).transpose(1, 2)
        step = F.softplus(step + self.step).transpose(1, 2)
        y = self.scan(values * step[..., None], -self.log_decay.exp()[:, None] * step, write, read)
        y = (y + values * self.skip[:, None, None]).transpose(1, 2).flatten(2)
        return self.leave(self.norm(y * F.silu(gate)))

    def scan(self, values: Tensor, decay: Tensor, write: Tensor, read: Tensor) -> Tensor:
        """The outputs (batch, heads, length, head) from one chunk to the next."""
        batch, heads, _, head = values.shape
        state = values.new_zeros(batch, heads, self.states, head)
        done = []
        parts = (values.split(self.chunk, 2), decay.split(self.chunk, 2))
        for v, a, b, c in zip(*parts, write.split(self.chunk, 1), read.split(self.chunk, 1), strict=True):
            y, state = self.scan_chunk(state, v, a.cumsum(-1), b[:, None], c[:, None])
            done.append(y)
        return torch.cat(done, 2)

    def scan_chunk(
        self, state: Tensor, values: Tensor, total: Tensor, write: Tensor, read: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The chunk's outputs and the state after it; `total` is the summed decay up to each place."""
        later = torch.ones(2 * total.shape[-1:], dtype=torch.bool, device=total.device).triu(1)
        between = (total[..., :, None] - total[..., None, :]).masked_fill(later, -torch.inf).exp()
        y = (read @ write.transpose(-1, -2) * between) @ values
        y = y + (read @ state) * total.exp()[..., None]
        left = (total[..., -1:] - total).exp()[..., None]
        state = state * total[..., -1:, None].exp() + write.transpose(-1, -2) @ (values * left)
        return y, state


class Mamba(nn.Module):
    """A language model of selective scans, with its loss."""

    def __init__(self, layers: int, width: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.norms = nn.ModuleList(RMSNorm(width) for _ in range(layers))
        self.mixers = nn.ModuleList(SelectiveScan(width) for _ in range(layers))
        self.norm = RMSNorm(width)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for norm, mixer in zip(self.norms, self.mixers, strict=True):
            x = x + mixer(norm(x))
        return next_token_loss(F.linear(self.norm(x), self.tokens.weight), targets)


class LSTM(nn.Module):
    """A language model of one LSTM layer, its cell written out for every step, with its loss."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.width = width
        self.tokens, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        self.gates = nn.Linear(2 * width, 4 * width)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = cell = torch.zeros(len(tokens), self.width, device=tokens.device)
        outputs = []
        for x in self.tokens(tokens).unbind(1):
            hidden, cell = self.cell(x, hidden, cell)
            outputs.append(hidden)
        return next_token_loss(self.head(torch.stack(outputs, 1)), targets)

    def cell(self, x: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
        enter, forget, new, leave = self.gates(torch.cat([x, hidden], 1)).chunk(4, 1)
        cell = forget.sigmoid() * cell + enter.sigmoid() * new.tanh()
        return leave.sigmoid() * cell.tanh(), cell
