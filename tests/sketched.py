"""Small models for the tests on sketches, and what their steps leave behind."""

import torch
from torch import nn

WIDTH = 64


class Attention(nn.Module):
    """Query, key and value read one input."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x):
        weights = torch.softmax(self.query(x) @ self.key(x).mT / 8, -1)
        return self.out(weights @ self.value(x))


class Block(nn.Module):
    """A block of a transformer, with dropout and a layer that works in place."""

    def __init__(self, width=WIDTH, dropout=0.1):
        super().__init__()
        self.attention = Attention(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(2 * width, width),
        )

    def forward(self, x, mask=None):
        x = x + self.attention(x)
        return x + self.mlp(x)


class WithLoss(nn.Module):
    """The mean square of what a block gives, over real rows where there is a mask."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x, mask=None):
        found = self.net(x).square().mean(-1)
        return found.mean() if mask is None else (found * mask).sum() / mask.sum()


def gradients(model):
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def step(model, *batch, seed=0):
    """The gradients of a step from a given random state."""
    model.zero_grad()
    torch.manual_seed(seed)
    model(*batch).sum().backward()
    return gradients(model)


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def close(left, right, tolerance=1e-5):
    """Equal up to a share of the largest number of each tensor; what is zero but for rounding is left out."""
    assert left.keys() == right.keys()
    for name, value in left.items():
        size = right[name].abs().max().item()
        if size > 1e-6:
            torch.testing.assert_close(value, right[name], rtol=0, atol=tolerance * size, msg=name)


def saved_storages(forward):
    """What autograd keeps of a forward, as bytes by storage, and its result."""
    seen = {}

    def pack(tensor):
        seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
    return seen, result


def saved_bytes(forward, *, besides=()):
    """The bytes that autograd keeps of a forward, without those of some tensors."""
    seen, result = saved_storages(forward)
    del result
    for tensor in besides:
        seen.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(seen.values())
