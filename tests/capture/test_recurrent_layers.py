"""`nn.LSTM`, `nn.GRU` and `nn.RNN` inside of a model: bit for bit as eager trains them, with known bytes."""

import pytest
import torch
from torch import nn

import lowtide
from lowtide.capture.rewrites.recurrent import are_captured

WIDTH = 32  # whole vectors of the CPU: the gates of a GRU round alike in rows and all in one


class Recurrent(nn.Module):
    """A layer before and a loss after, with dropout around, so that random numbers must be as in eager."""

    def __init__(self, kind, **options):
        super().__init__()
        self.first, self.layer = nn.Linear(8, WIDTH), kind(WIDTH, WIDTH, **options)
        self.last = nn.LazyLinear(4)

    def forward(self, x, *start):
        states, _ = self.layer(nn.functional.dropout(self.first(x), 0.2), *start)
        return self.last(nn.functional.dropout(states.tanh(), 0.2)).square().mean()


KINDS = {
    "lstm": (nn.LSTM, {}),
    "lstm, two ways": (
        nn.LSTM,
        {"num_layers": 2, "dropout": 0.3, "bidirectional": True, "batch_first": True},
    ),
    "lstm, projected": (nn.LSTM, {"proj_size": 5}),
    "gru": (nn.GRU, {"num_layers": 2, "dropout": 0.3}),
    "rnn": (nn.RNN, {"bias": False}),
}


def made(kind, options, dtype=torch.float32):
    torch.manual_seed(0)
    model = Recurrent(kind, **options).to(dtype)
    with torch.no_grad():
        model(torch.ones(4, 3, 8, dtype=dtype))  # the lazy one
    return model


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "options"), KINDS.values(), ids=KINDS)
@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_layers_train_under_the_smallest_cap(kind, options):
    found = lowtide.verify(made(kind, options), torch.randn(4, 3, 8), budget="min")
    assert found, str(found)
    assert found.predicted == found.measured


@pytest.mark.slow
def test_states_that_are_given_and_double_precision():
    start = tuple(torch.randn(1, 3, WIDTH, dtype=torch.double, requires_grad=True) for _ in range(2))
    model = made(nn.LSTM, {}, torch.double)
    found = lowtide.verify(model, torch.randn(4, 3, 8, dtype=torch.double), start, budget="min")
    assert found, str(found)
    assert found.predicted == found.measured


def test_where_kernels_may_not_run_the_workspace_is_learnt_in_the_first_step():
    model, x = made(nn.LSTM, {}), torch.randn(5, 2, 8)
    unmeasured = lowtide.plan(model, x).peak
    lowtide.cap(model, "1MiB", prices="roofline")
    for _ in range(2):
        model(x).backward()
    assert lowtide.plan_of(model).uncapped.peak > unmeasured


def test_what_a_gpu_runs_in_a_library_is_not_captured():
    with pytest.raises(lowtide.GraphBreak, match=r"lowtide\.Recurrent"):
        lowtide.plan(made(nn.LSTM, {}), torch.randn(4, 3, 8), device="H200")
    assert are_captured([nn.LSTM(4, 4), nn.Linear(4, 4)])


def test_torch_is_as_it_was():
    model = lowtide.cap(made(nn.RNN, {}), "1MiB")
    model(torch.randn(4, 3, 8)).backward()
    assert not torch._dynamo.config.allow_rnn
    assert torch.ops.aten.lstm.input.py_kernels
