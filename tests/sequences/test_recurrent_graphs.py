"""Stock recurrent modules in graphs, with a stand-in for CUDA's (`captures` in conftest.py).

What CUDA itself does is in test_gpu.py.
"""

import pytest
import torch
from torch import nn

from loop_part import loop_part
from lowtide import LowtideError
from lowtide.sequences.recurrent import Recurrent

MODULES = {
    "lstm": lambda **options: nn.LSTM(4, 5, **options),
    "gru": lambda **options: nn.GRU(4, 5, **options),
    "relu": lambda **options: nn.RNN(4, 5, nonlinearity="relu", **options),
    "projected": lambda **options: nn.LSTM(4, 5, proj_size=3, **options),
}


@pytest.fixture(autouse=True)
def double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def gradients(net, x, wanted):
    output, last = net(x)
    last = last if isinstance(last, tuple) else (last,)
    loss = output.square().sum() + sum(leaf.sin().sum() for leaf in last)
    return [output, *last, *torch.autograd.grad(loss, wanted)]


def check_equal(module, wrapper, x):
    wanted = [*module.parameters(), *([x] if x.requires_grad else [])]
    for mine, true in zip(gradients(wrapper, x, wanted), gradients(module, x, wanted), strict=True):
        torch.testing.assert_close(mine, true, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("bidirectional", [False, True], ids=["one_way", "both_ways"])
@pytest.mark.parametrize("kind", MODULES)
def test_gradients_are_those_of_the_module(kind, bidirectional, captures):
    module = MODULES[kind](num_layers=2, bidirectional=bidirectional)
    for steps, batch_first in ((24, False), (22, True)):  # the last block is whole, or shorter
        module.batch_first = batch_first
        x = torch.randn((3, steps, 4) if batch_first else (steps, 3, 4), requires_grad=not batch_first)
        captures["launched"].clear()
        check_equal(module, Recurrent(module, budget="80%", chunk=4, graphs=True), x)
        assert len(captures["launched"]) == (8 if bidirectional else 2)
        assert min(captures["launched"]) > 1


def test_dropout_between_layers_is_drawn_as_without_graphs(captures):
    module = nn.LSTM(4, 5, num_layers=3, dropout=0.4)
    x = torch.randn(50, 3, 4, requires_grad=True)
    found = []
    for graphs in (False, True):
        torch.manual_seed(11)
        wrapper = Recurrent(module, budget="500KiB", chunk=5, graphs=graphs)
        assert wrapper.plan(x).graphs is graphs
        found.append(gradients(wrapper, x, [x, *module.parameters()]))
        found[-1].append(torch.rand(3))
    assert len(captures["launched"]) == 2
    for mine, true in zip(*found, strict=True):
        assert torch.equal(mine, true)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lstm", "gru"])
@pytest.mark.parametrize("steps", [48, 45])
def test_peak_and_runs_are_as_planned(steps, kind, captures):
    module = MODULES[kind](num_layers=2)
    x = torch.randn(steps, 6, 4, requires_grad=True)
    wrappers = [Recurrent(module, budget=budget, graphs=True) for budget in ("20%", "80%")]
    wrappers.append(Recurrent(module, budget="30%", chunk=6, graphs=True))
    for wrapper in wrappers:
        plan = wrapper.plan(x)
        captures["launched"].clear()
        assert loop_part(wrapper, x) <= plan.peak <= plan.budget < plan.keep_all
        short = steps % plan.chunk
        assert plan.chunk * sum(captures["launched"]) + short == plan.forward_count
    assert plan.chunk == 6


@pytest.mark.slow
def test_both_directions_share_the_budget(captures):
    module = MODULES["lstm"](bidirectional=True)
    x = torch.randn(48, 6, 4, requires_grad=True)
    whole = sum(plan.keep_all for plan in Recurrent(module, chunk=4).plan(x))
    for share in (0.2, 0.5, 0.9):
        wrapper = Recurrent(module, budget=int(share * whole), chunk=4, graphs=True)
        assert loop_part(wrapper, x) <= share * whole
    assert len(captures["launched"]) == 12


@pytest.mark.slow
def test_a_plan_in_graphs_is_taken_where_it_costs_less(captures):
    module = nn.LSTM(8, 16)
    x = torch.randn(400, 4, 8)
    plans = [Recurrent(module, budget=budget).plan(x) for budget in ("min", "5%", "20%", "100%")]
    assert [plan.graphs for plan in plans] == [False, True, True, False]
    assert all(plan.peak <= plan.budget for plan in plans)
    assert plans[2].runs_per_step <= 2
    assert Recurrent(module, budget="100%", graphs=True).plan(x).graphs
    assert not Recurrent(module, budget="20%", graphs=False).plan(x).graphs


def test_what_cannot_be_captured_runs_block_by_block_from_then_on(captures, caplog_lowtide):
    captures["error"] = RuntimeError("a block is not permitted")
    module = nn.GRU(4, 5)
    x = torch.randn(64, 3, 4, requires_grad=True)
    wrapper = Recurrent(module, budget="50%", chunk=4, graphs=True)
    check_equal(module, wrapper, x)
    assert [message for message in caplog_lowtide if "a block is not permitted" in message]
    with pytest.raises(LowtideError, match="could not be captured"):
        wrapper(x)
    wrapper.graphs = "auto"
    assert not wrapper.plan(x).graphs
    check_equal(module, wrapper, x)


def test_what_is_asked_for_is_refused_where_it_cannot_be(captures):
    module, x = nn.LSTM(4, 5), torch.randn(40, 2, 4)
    for options in ({"slots": 3}, {"budget": "min"}):
        with pytest.raises(LowtideError, match="no budget in bytes"):
            Recurrent(module, graphs=True, **options)(x)
    with pytest.raises(LowtideError, match="different lengths"):
        Recurrent(module, graphs=True, budget="50%")(x, lengths=[40, 31])
    with pytest.raises(LowtideError, match="no two blocks"):
        Recurrent(module, graphs=True, budget="100%", chunk=40)(x)
    with pytest.raises(LowtideError, match="must be True"):
        Recurrent(module, graphs="always")
    assert not captures["launched"]


def test_without_a_gpu_it_is_refused():
    with pytest.raises(LowtideError, match="not on a CUDA device"):
        Recurrent(nn.LSTM(4, 5), budget="50%", graphs=True)(torch.randn(40, 2, 4))


def test_under_autocast_the_carry_is_as_the_blocks_hand_it_on(captures):
    module = nn.LSTM(4, 5, num_layers=2).float()
    x = torch.randn(22, 3, 4, dtype=torch.float32, requires_grad=True)
    found = []
    for graphs in (False, True):
        wrapper = Recurrent(module, budget="80%", chunk=4, graphs=graphs)
        with torch.autocast("cpu", torch.bfloat16):
            found.append(gradients(wrapper, x, [x, *module.parameters()]))
    assert len(captures["launched"]) == 2
    assert found[1][1].dtype == torch.bfloat16
    for mine, true in zip(*found, strict=True):
        assert torch.equal(mine, true)
