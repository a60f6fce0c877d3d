"""`lowtide.noise`: what it says is what draws show, and it leaves everything as it was."""

import copy

import pytest
import torch
from torch import nn

import lowtide
from lowtide.sketching.kinds import KINDS
from lowtide.sketching.moments import moments
from sketched import WIDTH, Block, WithLoss, gradients, same, step

pytestmark = pytest.mark.slow


@pytest.fixture
def x():
    return torch.randn(4, 10, WIDTH)


def drawn(model, x, name, draws=300, **options):
    """The measured variance of a layer's weight gradient, and its standard error."""
    exact = step(model, x)[name]
    model = lowtide.sketch(copy.deepcopy(model), **options)
    off = torch.stack([(step(model, x, seed=seed)[name] - exact).square().sum() for seed in range(draws)])
    return off.mean().item(), off.std().item() / draws**0.5


@pytest.mark.parametrize("kind", KINDS)
def test_the_variance_is_that_of_draws(kind, x):
    model = WithLoss(nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 8)))
    rate = 0.25 if KINDS[kind].has_rate else None
    found = {layer.name: layer for layer in lowtide.noise(model, x, rate=rate, kind=kind).layers}
    variance, error = drawn(model, x, "net.0.weight", rate=rate, kind=kind)
    slack = variance * 2 / 40 if kind == "dct" else 0  # its law is one to order 1 / rows
    assert abs(variance - found["net.0"].variance) < 4 * error + slack


def test_the_variance_of_sgd_itself():
    """Batches of independent rows: the variance of their summed gradient, by the closed form of many."""
    rows, batches = 16, 4000
    all_x, all_g = torch.randn(batches, rows, 3).double() + 1, torch.randn(batches, rows, 2).double() * 2
    sums = all_g.mT @ all_x
    spread = sums.var(0).sum().item()
    found = torch.tensor([moments(x, g).own for x, g in zip(all_x, all_g, strict=True)])
    error = (sums - sums.mean(0)).square().sum((1, 2)).std().item() / batches**0.5
    assert abs(found.mean().item() - spread) < 4 * error


def test_nothing_is_changed(x):
    model = WithLoss(nn.Sequential(Block(), nn.Flatten(0, 1), nn.BatchNorm1d(WIDTH)))
    model(x).backward()
    before = gradients(model), {n: b.clone() for n, b in model.named_buffers()}, torch.get_rng_state()
    attributes = [sorted(vars(part)) for part in model.modules()]
    lowtide.noise(model, x, rate=0.5)
    assert same(gradients(model), before[0])
    assert same(dict(model.named_buffers()), before[1])
    assert torch.equal(torch.get_rng_state(), before[2])
    assert [sorted(vars(part)) for part in model.modules()] == attributes
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


def test_before_and_after_a_sketch(x):
    model = WithLoss(Block(dropout=0))
    before = lowtide.noise(model, x, rate=0.3, kind="rows", layers="net.mlp")
    after = lowtide.noise(lowtide.sketch(model, 0.3, kind="rows", layers="net.mlp"), x)
    assert [layer.name for layer in after.layers] == ["net.mlp.0", "net.mlp.3"]
    for one, other in zip(before.layers, after.layers, strict=True):
        assert one.variance == pytest.approx(other.variance, rel=1e-5)
        assert (one.rows, one.bytes, one.kept) == (other.rows, other.bytes, other.kept)


def test_shared_inputs_are_told_and_counted_once(x):
    found = lowtide.noise(WithLoss(Block()), x, rate=0.1)
    shares = {layer.name: layer.shares for layer in found.layers}
    assert shares["net.attention.key"] == shares["net.attention.value"] == "net.attention.query"
    assert shares["net.mlp.0"] is None
    assert found.saved == sum(layer.bytes - layer.kept for layer in found.layers if layer.shares is None)
    assert "as net.attention.query" in str(found)


@pytest.mark.parametrize("kind", ["strided", "rows", "gaussian", "srht", "rows_by_norm"])
def test_the_needed_rate_keeps_to_the_ratio(kind, x):
    model = WithLoss(nn.Linear(WIDTH, 8))
    for at in (0.5, 2.0):
        (layer,) = lowtide.noise(model, x, rate=0.1, kind=kind, at=at).layers
        (there,) = lowtide.noise(model, x, rate=layer.needed, kind=kind).layers
        slack = 1.2 if kind == "strided" else 1.0001  # its law is a mean over orders of the rows
        assert there.ratio <= at * slack


def test_the_table(x):
    text = str(lowtide.noise(WithLoss(Block()), x, rate=0.25, at=2))
    lines = text.splitlines()
    assert lines[0].split("  ")[0] == "layer"
    assert lines[0].endswith("rate for 2")
    assert len(lines) == 1 + 6 + 1
    assert "2.56 KiB (strided 0.25)" in text
    assert "where nothing else keeps these inputs" in lines[-1]
    assert "int8)" not in str(lowtide.noise(WithLoss(Block()), x, rate=0.25))
    assert "(int8)" in str(lowtide.noise(WithLoss(Block()), x, kind="int8"))


def test_max_noise_raises_rates_or_leaves_layers_out(x, caplog_lowtide):
    model = WithLoss(Block(dropout=0))
    lowtide.sketch(model, 0.1, max_noise=1.0, batch=(x,))
    rates = {n: part.forward.args[1].rate for n, part in model.named_modules() if "forward" in vars(part)}
    assert all(0.1 < rate < 1 for rate in rates.values())
    together = {rates[f"net.attention.{name}"] for name in ("query", "key", "value")}
    assert len(together) == 1
    assert all(layer.ratio < 1.001 for layer in lowtide.noise(model, x).layers)
    lowtide.unsketch(model)
    lowtide.sketch(model, kind="int4", max_noise=1e3, batch=(x,))
    assert sum("forward" in vars(part) for part in model.modules()) == 6
    lowtide.unsketch(model)
    with pytest.raises(lowtide.LowtideError, match="max_noise=1e-09 leaves no layer to sketch"):
        lowtide.sketch(model, kind="int4", max_noise=1e-9, batch=(x,))
    assert any("net.mlp.0 is not sketched" in message for message in caplog_lowtide)


def test_masks_are_used_and_wrong_ones_are_told():
    model, x, mask = WithLoss(Block(dropout=0)), torch.randn(4, 10, WIDTH), torch.ones(4, 10)
    mask[:, 6:] = 0
    plain = lowtide.noise(model, x, mask, rate=0.3, layers="net.mlp")
    masked = lowtide.noise(model, x, mask, rate=0.3, layers="net.mlp", rows="mask")
    assert [layer.rows for layer in masked.layers] == [24, 24]
    assert all(a.variance < b.variance for a, b in zip(masked.layers, plain.layers, strict=True))
    assert "WRONG MASK" not in str(masked)
    wrong = lowtide.noise(model, x, rate=0.3, layers="net.mlp", rows=lambda x: mask)
    assert all(layer.hidden > 0.1 for layer in wrong.layers)
    assert "WRONG MASK" in str(wrong)


@pytest.mark.parametrize("most", [0.1, 1.0])
def test_max_noise_holds_for_rows_in_the_order_that_they_have(most):
    """Only first tokens get a gradient: how many of them meet in a bucket depends on the rate."""

    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)

        def forward(self, x):
            return self.head(torch.tanh(self.layer(x)))[:, 0].square().sum()

    for length in (8, 9, 16):
        model, x = First(), torch.randn(32, length, WIDTH)
        lowtide.sketch(model, 0.1, max_noise=most, batch=(x,))
        assert all(layer.ratio <= most * 1.001 for layer in lowtide.noise(model, x).layers)


@pytest.mark.parametrize("kind", ["gaussian", "rademacher", "rows_by_norm", "srht", "dct"])
def test_rows_that_a_transform_takes_as_zeros_count_in_its_noise(kind):
    """A cosine or Hadamard transform is as long as all rows: few real ones do not make it exact."""
    model, x, mask = WithLoss(nn.Linear(WIDTH, 4)), torch.randn(4, 10, WIDTH), torch.zeros(4, 10)
    mask[:, :2] = 1
    zeros = x * mask.unsqueeze(-1)
    with_mask = lowtide.noise(model, x, mask, rate=0.3, kind=kind, rows="mask").layers[0]
    of_zeros = lowtide.noise(model, zeros, mask, rate=0.3, kind=kind).layers[0]
    assert with_mask.variance == pytest.approx(of_zeros.variance, rel=1e-5)
    assert with_mask.variance > 0


def test_a_layer_that_is_called_twice(x):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return self.layer(torch.tanh(self.layer(x))).square().mean()

    model = Twice()
    (found,) = lowtide.noise(model, x, rate=0.25).layers
    assert found.rows == 80
    assert found.bytes == 2 * 40 * WIDTH * 4
    variance, error = drawn(model, x, "layer.weight", rate=0.25)
    assert abs(variance - found.variance) < 4 * error


def test_autocast_counts_what_is_cast(x):
    model = nn.Linear(WIDTH, 8)
    with torch.autocast("cpu", torch.bfloat16):
        (found,) = lowtide.noise(model, x, rate=0.25).layers
    assert found.bytes == 40 * WIDTH * 2
