"""Modules that nobody wrote: random stacks and branches of layers, at random budgets."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import lowtide
from one_capture import one_capture

pytestmark = pytest.mark.slow

BATCH, WIDTH, LENGTH = 24, 8, 20

ACTIVATIONS = [nn.ReLU, nn.GELU, nn.Tanh, nn.SiLU, nn.Sigmoid]


class Residual(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x):
        return x + self.body(x)


class Concatenated(nn.Module):
    """Two branches side by side, brought back to the width."""

    def __init__(self, left, right):
        super().__init__()
        self.left, self.right, self.mix = left, right, nn.Conv1d(2 * WIDTH, WIDTH, 1)

    def forward(self, x):
        return self.mix(torch.cat([self.left(x), self.right(x)], 1))


class Reshaped(nn.Module):
    """A layer that sees the batch with its dimensions turned and folded."""

    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x):
        y = x.transpose(1, 2).reshape(-1, WIDTH)
        return self.body(y).view(BATCH, LENGTH, WIDTH).permute(0, 2, 1)


class Shared(nn.Module):
    """One layer applied twice."""

    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x):
        return self.body(self.body(x).tanh())


class Halves(nn.Module):
    """A gate: one half of the features weighs the other."""

    def __init__(self):
        super().__init__()
        self.spread = nn.Conv1d(WIDTH, 2 * WIDTH, 1)

    def forward(self, x):
        value, weight = self.spread(x).chunk(2, 1)
        return value * weight.sigmoid()


def stack(layers):
    return nn.Sequential(*layers)


def in_place_relu():
    """After a layer of its own: what it overwrites must not be needed by the layer before."""
    return nn.Sequential(nn.Conv1d(WIDTH, WIDTH, 1), nn.ReLU(inplace=True))


leaves = st.one_of(
    st.sampled_from(
        [
            lambda: nn.Linear(LENGTH, LENGTH),
            lambda: nn.LayerNorm(LENGTH),
            lambda: nn.BatchNorm1d(WIDTH),
            lambda: Reshaped(nn.Linear(WIDTH, WIDTH)),
            lambda: Reshaped(nn.BatchNorm1d(WIDTH)),
            in_place_relu,
            Halves,
            *ACTIVATIONS,
        ]
    ),
    st.sampled_from([1, 3, 5]).map(lambda size: lambda: nn.Conv1d(WIDTH, WIDTH, size, padding=size // 2)),
    st.sampled_from([0.1, 0.5]).map(lambda share: lambda: nn.Dropout(share)),
)


def larger(parts):
    """Builders of composed modules from builders of their parts."""
    return st.one_of(
        st.lists(parts, min_size=2, max_size=4).map(lambda made: lambda: stack([make() for make in made])),
        parts.map(lambda make: lambda: Residual(make())),
        parts.map(lambda make: lambda: Shared(make())),
        st.tuples(parts, parts).map(lambda pair: lambda: Concatenated(pair[0](), pair[1]())),
    )


class Step(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = nn.Sequential(nn.Conv1d(WIDTH, WIDTH, 3, padding=1), body, nn.Linear(LENGTH, 3))

    def forward(self, x):
        return self.body(x).square().mean()


def verify_or_floor(model, x, budget):
    try:
        return lowtide.verify(model, x, budget=budget, prices="roofline")
    except lowtide.BudgetTooSmall as error:
        return lowtide.verify(model, x, budget=error.smallest, prices="roofline")


@settings(max_examples=25, derandomize=True)
@given(
    st.lists(st.recursive(leaves, larger, max_leaves=6), min_size=1, max_size=4),
    st.integers(30, 100),
    st.integers(0, 1000),
)
def test_step_is_exact_and_peak_as_predicted(parts, percent, seed):
    torch._dynamo.reset()
    torch.manual_seed(seed)
    model = Step(stack([make() for make in parts]))
    with one_capture():
        found = verify_or_floor(model, torch.randn(BATCH, WIDTH, LENGTH), f"{percent}%")
    assert found.exact, f"{model}\n{found}"
    assert found.measured == found.predicted, f"{model}\n{found}"
    assert found.measured <= found.plan.budget
    assert found.ok
