"""Checkpoints of real Sequentials: the measured peak is the predicted one, gradients are the same bits."""

from itertools import combinations
from random import Random

import pytest
import torch
from torch import nn

from lowtide import measure
from lowtide.errors import BudgetTooSmall, LowtideError, NothingToTrain
from lowtide.layer_chain.checkpointed import checkpoint_chain
from lowtide.measuring.trial import Trial
from lowtide.solve.chain import checkpoints, peak_of

Linear = nn.Linear


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Sequential(
            nn.LayerNorm(width), Linear(width, 2 * width), nn.GELU(), Linear(2 * width, width)
        )

    def forward(self, x):
        return x + self.inner(x)


def tied():
    layer = Linear(16, 16)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), layer, nn.Tanh(), Linear(16, 3))


def convolutions():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        Linear(256, 10),
    )


def norms():
    return nn.Sequential(
        Linear(10, 40),
        nn.BatchNorm1d(40),
        nn.Tanh(),
        Linear(40, 50),
        nn.BatchNorm1d(50),
        nn.Tanh(),
        Linear(50, 60),
        nn.Tanh(),
        Linear(60, 8),
    )


def encoder():
    return nn.Sequential(
        *(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True) for _ in range(4))
    )


MODELS = {
    "widths": (
        lambda: nn.Sequential(Linear(10, 20), nn.Tanh(), Linear(20, 50), nn.Tanh(), Linear(50, 8)),
        10,
    ),
    "inputs saved": (
        lambda: nn.Sequential(
            Linear(10, 40, bias=False), nn.GELU(), Linear(40, 50), nn.SiLU(), Linear(50, 8)
        ),
        10,
    ),
    "ends in an output": (lambda: nn.Sequential(Linear(10, 40), nn.GELU(), Linear(40, 9), nn.ReLU()), 10),
    "blocks": (lambda: nn.Sequential(*(nn.Sequential(Linear(16, 16), nn.Tanh()) for _ in range(6))), 16),
    "residual": (lambda: nn.Sequential(*(Residual(16) for _ in range(6))), 16),
    "one layer": (lambda: nn.Sequential(Linear(10, 3)), 10),
    "in place": (lambda: nn.Sequential(Linear(10, 40), nn.ReLU(True), Linear(40, 50), nn.ReLU(True)), 10),
    "frozen start": (
        lambda: nn.Sequential(Linear(10, 40).requires_grad_(False), nn.Tanh(), Linear(40, 50), nn.Tanh()),
        10,
    ),
    "views": (
        lambda: nn.Sequential(nn.Flatten(), Linear(10, 40), nn.Flatten(), nn.Tanh(), Linear(40, 5)),
        10,
    ),
    "tied": (tied, 16),
    "softmax": (
        lambda: nn.Sequential(
            nn.LayerNorm(16), Linear(16, 64), nn.Softmax(-1), Linear(64, 9), nn.LogSoftmax(-1)
        ),
        16,
    ),
    "dropout": (
        lambda: nn.Sequential(Linear(10, 40), nn.Dropout(), Linear(40, 50), nn.Dropout(), nn.Tanh()),
        10,
    ),
    "norms": (norms, 10),
    "convolutions": (convolutions, (3, 16, 16)),
    "encoder": (encoder, (12, 16)),
}


def make(name):
    build, shape = MODELS[name]
    shape = (shape,) if isinstance(shape, int) else shape
    return build(), torch.randn(100 if len(shape) == 1 else 4, *shape)


def run(model, chain, sample):
    """What a step of the chain gives and takes, from the state in which the model is."""
    trial = Trial(model, (sample,), {}, None)
    results, taken = trial.run(chain)
    trial.restore()
    return results, taken.peak


def kept_sets(model, chain, seed=0):
    """Some of all sets of outputs that can be kept."""
    with pytest.raises(LowtideError, match="possible are") as caught:
        checkpoint_chain(model, chain, keep=(-1,))
    possible = eval(str(caught.value).rpartition("possible are ")[2])
    inner = possible[1:-1]
    sets = [(0, *some, possible[-1]) for n in range(len(inner) + 1) for some in combinations(inner, n)]
    return Random(seed).sample(sets, min(len(sets), 12))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_measured_peak_is_the_predicted_one_and_bits_are_the_same(name):
    model, sample = make(name)
    plain, plain_peak = run(model, model, sample)
    chain = checkpoint_chain(model, sample)
    found, peak = run(model, chain, sample)
    assert chain.plain_peak == plain_peak
    assert chain.peak == peak <= plain_peak
    assert found.keys() == plain.keys()
    for key, tensor in plain.items():
        assert tensor is None or torch.equal(tensor, found[key]), key


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_measured_peak_is_the_predicted_one_for_any_checkpoints(name):
    model, sample = make(name)
    best = checkpoint_chain(model, sample).peak
    for keep in kept_sets(model, sample):
        chain = checkpoint_chain(model, sample, keep=keep)
        assert chain.peak == run(model, chain, sample)[1], keep
        assert chain.peak >= best


def test_a_sample_that_needs_a_gradient():
    model, sample = make("widths")
    sample.requires_grad_()
    chain = checkpoint_chain(model, sample, keep=(0, 2, 5))
    plain, _ = run(model, model, sample)
    found, peak = run(model, chain, sample)
    assert peak == chain.peak
    assert torch.equal(plain["gradients of input 0"], found["gradients of input 0"])


@pytest.mark.slow
def test_a_deep_chain_takes_far_less():
    model = nn.Sequential(*(nn.Sequential(Linear(32, 32), nn.Tanh()) for _ in range(40)))
    chain = checkpoint_chain(model, torch.randn(2000, 32))
    assert chain.peak < 0.4 * chain.plain_peak
    assert run(model, chain, torch.randn(2000, 32))[1] == chain.peak


@pytest.mark.slow
def test_torch_follows_the_law_that_bears_its_name():
    """Layers that save their input alone: the law of `checkpoints` is the measured peak, to the byte."""
    rng = Random(3)
    for _ in range(8):
        widths = [rng.randint(2, 30) for _ in range(rng.randint(2, 8))]
        model = nn.Sequential(*map(nn.AdaptiveAvgPool1d, widths[1:]))
        sample = torch.ones(5, widths[0], requires_grad=True)
        sizes = [20 * width for width in widths]
        output = sizes[-1]  # held by the caller all the while
        best = checkpoints(sizes, "swept", model="pytorch")
        for indices in (best.indices, (0, len(model)), tuple(range(len(widths)))):
            chain = checkpoint_chain(model, sample, keep=indices)
            law = peak_of(sizes, indices, "swept", model="pytorch")
            assert chain.peak == law + output == run(model, chain, sample)[1]
        assert checkpoint_chain(model, sample).peak == best.peak + output


def test_the_last_segment_and_layers_that_keep_only_their_input_run_once():
    model = nn.Sequential(*(nn.GELU() for _ in range(4)))
    calls = []
    for index, layer in enumerate(model):
        layer.register_forward_pre_hook(lambda *_, index=index: calls.append(index))
    sample = torch.randn(50, 4, requires_grad=True)
    chain = checkpoint_chain(model, sample, keep=(0, 1, 3, 4))
    assert [segment.again for segment in chain.segments] == [False, True, False]
    calls.clear()
    chain(sample).sum().backward()
    assert calls == [0, 1, 2, 3, 1, 2]


def test_the_wrapper_is_the_same_sequential():
    model, sample = make("norms")
    chain = checkpoint_chain(model, sample)
    assert list(chain.state_dict()) == list(model.state_dict())
    assert all(a is b for a, b in zip(chain.parameters(), model.parameters(), strict=True))
    assert len(chain) == len(model)
    assert chain[3] is model[3]
    assert "keeps 0, " in repr(chain)
    named = nn.Sequential()
    named.add_module("first", Linear(10, 10))
    named.add_module("second", nn.Tanh())
    assert list(checkpoint_chain(named, sample).state_dict()) == ["first.weight", "first.bias"]


def test_measuring_leaves_everything_as_it_was():
    model, sample = make("norms")
    model[1].eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model[0].weight.grad = grad = torch.ones_like(model[0].weight)
    state, kept = torch.get_rng_state(), sample.clone()
    chain = checkpoint_chain(model, sample)
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(sample, kept)
    assert model[0].weight.grad is grad
    assert model[3].weight.grad is None
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert (model[1].training, model[4].training, chain.training) == (False, True, True)


def test_without_gradients_nothing_is_kept():
    model, sample = make("blocks")
    chain = checkpoint_chain(model, sample)
    with torch.no_grad():
        peak = measure(lambda: chain(sample), device="cpu").peak
        assert peak == measure(lambda: model(sample), device="cpu").peak
    assert torch.equal(chain.eval()(sample), model(sample))


def test_two_backward_calls_add_up():
    model, sample = make("widths")
    chain = checkpoint_chain(model, sample)
    for _ in range(2):
        chain(sample).sum().backward()
    twice = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    for _ in range(2):
        model(sample).sum().backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(twice, model.parameters(), strict=True))


@pytest.mark.slow
def test_a_budget_runs_less_again():
    model = nn.Sequential(*(nn.Sequential(Linear(32, 32), nn.Tanh()) for _ in range(20)))
    sample = torch.randn(500, 32)
    least = checkpoint_chain(model, sample)
    again = []
    for budget in ("min", (least.peak + least.plain_peak) // 2, "85%", "100%"):
        chain = checkpoint_chain(model, sample, budget=budget)
        again.append(sum(s.end - s.start for s in chain.segments if s.again))
        assert run(model, chain, sample)[1] == chain.peak <= least.plain_peak
    assert again == sorted(again, reverse=True)
    assert again[-1] == 0 < again[0]
    with pytest.raises(BudgetTooSmall, match="the least peak of checkpoints here") as caught:
        checkpoint_chain(model, sample, budget=least.peak - 1)
    assert caught.value.smallest == least.peak
    with pytest.raises(LowtideError, match="write a number"):
        checkpoint_chain(model, sample, budget="free")


class Pair(nn.Module):
    def forward(self, x):
        return x, x


class Custom(nn.Sequential):
    def forward(self, x):
        return super().forward(x)


class Stop(nn.Module):
    def forward(self, x):
        return x.detach() + 1


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Linear(4, 4), r"takes an nn.Sequential, not Linear; .* lowtide.cap"),
        (Custom(Linear(4, 4)), "takes an nn.Sequential, not Custom"),
        (nn.Sequential(), "the Sequential is empty"),
        (nn.Sequential(Linear(4, 4), Pair()), r"layer 1 \(Pair\): its output is a tuple, not one tensor"),
        (nn.Sequential(nn.Identity(), nn.ReLU(inplace=True), Linear(4, 4)), r"layer 1 \(ReLU\): it changes"),
        (
            nn.Sequential(Linear(4, 4), Stop(), Linear(4, 4)),
            r"layer 1 \(Stop\): its output needs no gradient",
        ),
    ],
)
def test_misuse_is_answered_with_what_is_possible(model, message):
    with pytest.raises(LowtideError, match=message):
        checkpoint_chain(model, torch.ones(2, 4))


def test_a_sample_is_one_tensor_and_something_must_train():
    with pytest.raises(LowtideError, match="sample is a tuple; a Sequential takes one tensor"):
        checkpoint_chain(nn.Sequential(Linear(4, 4)), (torch.ones(2, 4),))
    with pytest.raises(NothingToTrain, match="is every parameter frozen"):
        checkpoint_chain(nn.Sequential(Linear(4, 4)).requires_grad_(False), torch.ones(2, 4))


def test_a_hook_on_a_gradient_is_not_called_by_measuring():
    model = nn.Sequential(Linear(4, 4), nn.Tanh())
    model[0].weight.register_post_accumulate_grad_hook(lambda parameter: parameter.data.zero_())
    with pytest.raises(LowtideError, match=r"0.weight has a hook .* before the hook is registered"):
        checkpoint_chain(model, torch.ones(2, 4))
    assert model[0].weight.count_nonzero()


class Counts(nn.Module):
    """Puts another tensor in the place of its buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls = self.calls + 1
        return torch.sin(x)


def test_buffers_that_are_replaced_are_replaced_once():
    model = nn.Sequential(Linear(4, 9), Counts(), Linear(9, 4), nn.Tanh(), Linear(4, 4))
    chain = checkpoint_chain(model, torch.ones(2, 4), keep=(0, 3, 5))
    assert model[1].calls == 0
    chain(torch.ones(2, 4)).sum().backward()
    assert model[1].calls == 1
