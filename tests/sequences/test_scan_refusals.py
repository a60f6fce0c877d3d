"""What `scan` refuses, what it says, and that nothing was changed by then."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from lowtide import BudgetError, BudgetTooSmall, LowtideError
from lowtide.sequences import scan, scan_plan
from plain_loop import Lstm, gradients, plain, same, weighed

F64 = torch.float64
WEIGHT = torch.linspace(-1, 1, 16, dtype=F64).view(4, 4).requires_grad_()
WAYS = [{"slots": 3}, {"budget": "min"}]


def tanh(h, x):
    return torch.tanh(h @ WEIGHT + x)


def added(h, x):
    h += 1
    return tanh(h, x), None


def called(h, x):
    h.mul_(2)
    return tanh(h, x), None


def set_item(h, x):
    h[0] = 0
    return tanh(h, x), None


def set_view(h, x):
    h[0].zero_()
    return tanh(h, x), None


def relu(h, x):
    return tanh(functional.relu(h, inplace=True), x), None


def of_input(h, x):
    x *= 2
    return tanh(h, x), None


def of_data(h, x):
    x.data.add_(1)
    return tanh(h, x), None


def into_input(h, x):
    torch.add(h.detach(), 1, out=x)
    return tanh(h, x), None


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("cell", [added, called, set_item, set_view, relu, of_input, of_data, into_input])
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_a_cell_that_changes_what_it_is_given(cell, way, xs, start):
    before = xs.clone(), start.clone()
    with pytest.raises(LowtideError, match="in place"):
        scan(cell, start, xs, **way)
    assert same((xs, start), before)


def test_a_cell_that_changes_an_integer_of_its_carry(xs, start):
    def cell(carry, x):
        h, n = carry
        n += 1
        return (tanh(h, x), n), None

    count = torch.zeros((), dtype=torch.long)
    with pytest.raises(LowtideError, match="in place"):
        scan(cell, (start, count), xs, slots=3)
    assert count == 0


def test_a_cell_may_change_what_it_has_made_itself(xs, start):
    def cell(h, x):
        return torch.tanh((h @ WEIGHT).add_(x)), functional.relu(h.clone(), inplace=True).sum()

    expected = gradients(lambda: plain(cell, start, xs), [WEIGHT])
    assert same(gradients(lambda: scan(cell, start, xs, slots=3), [WEIGHT])[:2], expected[:2])


class Normed(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, h, x):
        return tanh(self.norm(h), x), h.sum()


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize(
    "norm",
    [nn.BatchNorm1d(4, dtype=F64), nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4, dtype=F64))],
    ids=["batch norm", "spectral norm"],
)
def test_modules_that_change_their_buffers(norm, way, xs, start):
    norm.train()
    module = Normed(norm)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(LowtideError, match=r"changes norm\.\S+ in place"):
        scan(module, start, xs, **way)
    assert same(module.state_dict(), before)
    module.eval()
    weighed(scan(module, start, xs, **way)).backward()


def test_batch_norm_without_running_statistics_is_supported(xs, start):
    module = Normed(nn.BatchNorm1d(4, track_running_stats=False, dtype=F64))
    wanted = [WEIGHT, *module.parameters()]
    expected = gradients(lambda: plain(module, start, xs), wanted)
    assert same(gradients(lambda: scan(module, start, xs, slots=3), wanted)[:2], expected[:2], 1e-12)


def test_a_buffer_that_is_changed_in_a_later_step(xs, start):
    buffer = torch.zeros(4, dtype=F64)

    def cell(carry, x):
        h, n = carry
        if n == 3:
            buffer.add_(1)
        return (tanh(h, x + buffer), n + 1), None

    with pytest.raises(LowtideError, match="changes buffer in place"):
        scan(cell, (start, 0), xs, slots=3)


def test_changes_between_the_scan_and_its_backward(xs, start):
    weight, buffer, count = (
        WEIGHT.detach().clone().requires_grad_(),
        torch.ones(4, dtype=F64),
        torch.zeros(2).long(),
    )

    def cell(carry, x):
        h, n = carry
        return (torch.tanh(h @ weight + x * buffer), n + 1), h.sum() + n.sum()

    for changed, error in (
        (weight, RuntimeError),
        (count, RuntimeError),
        (xs, RuntimeError),
        (buffer, LowtideError),
    ):
        loss = weighed(scan(cell, (start, count), xs, slots=3))
        with torch.no_grad():
            changed.add_(1)
        with pytest.raises(error, match=r"inplace|in place"):
            loss.backward()
        assert weight.grad is None


class Remembers(nn.Module):
    def __init__(self, kept):
        super().__init__()
        self.kept, self.previous = kept, None

    def forward(self, h, x):
        h = tanh(h if self.previous is None else h + self.previous, x)
        self.previous = self.kept(h)
        return h, None


@pytest.mark.parametrize("way", [*WAYS, {"slots": 3, "strategy": "internal"}], ids=str)
@pytest.mark.parametrize(
    "kept", [lambda h: h, torch.detach, lambda h: 2 * h], ids=["itself", "detached", "twice"]
)
def test_a_tensor_that_leaks_into_the_next_step(kept, way, xs, start):
    with pytest.raises(LowtideError, match="left behind"):
        scan(Remembers(kept), start, xs, **way)


def test_a_tensor_that_is_only_looked_at_may_be_left_behind(xs, start):
    seen = []

    def cell(h, x):
        h = tanh(h, x)
        seen.append(h.detach())
        return h, h.sum()

    weighed(scan(cell, start, xs, slots=3)).backward()


def test_random_numbers_that_would_not_come_again(xs, start):
    own = torch.Generator()
    with pytest.raises(LowtideError, match="generator of its own"):
        scan(lambda h, x: (tanh(h, torch.rand(4, generator=own, dtype=F64)), None), start, xs, slots=3)

    def cell(carry, x):
        h, n = carry
        return (tanh(h, x * torch.rand(4, dtype=F64) if n >= 3 else x), n + 1), None

    with pytest.raises(LowtideError, match="random=True"):
        scan(cell, (start, 0), xs, slots=3)
    expected = gradients(lambda: plain(cell, (start, 0), xs), [WEIGHT])
    got = gradients(lambda: scan(cell, (start, 0), xs, slots=3, random=True), [WEIGHT])
    assert same(got, expected)


def test_a_leaf_that_the_cell_makes(xs, start):
    def cell(h, x):
        q = h.detach().requires_grad_()
        (force,) = torch.autograd.grad((q @ WEIGHT).pow(2).sum(), q, create_graph=True)
        return h - 0.1 * force + x, None

    with pytest.raises(LowtideError, match=r"requires_grad_\(\)"):
        scan(cell, start, xs, slots=3)

    def supported(h, x):
        q = h if h.requires_grad else h.clone().requires_grad_()
        (force,) = torch.autograd.grad((q @ WEIGHT).pow(2).sum(), q, create_graph=True)
        return h - 0.1 * force + x, None

    start.requires_grad_()
    expected = gradients(lambda: plain(supported, start, xs), [WEIGHT, start])
    assert same(
        gradients(lambda: scan(supported, start, xs, slots=3), [WEIGHT, start])[:2], expected[:2], 1e-12
    )


@pytest.mark.parametrize("way", [*WAYS, {}, {"slots": 3, "lengths": torch.tensor([9, 4])}], ids=str)
@pytest.mark.parametrize(
    ("cell", "match"),
    [
        (lambda h, x: (torch.cat([tanh(h, x)] * 2, 1), None), "shape, dtype"),
        (lambda h, x: (tanh(h, x).sum(0, keepdim=True), None), "shape, dtype"),
        (lambda h, x: (tanh(h, x).to(torch.complex128), None), "shape, dtype"),
        (lambda h, x: ((tanh(h, x), h), None), "structure"),
        (lambda h, x: tanh(h, x), "pair"),
        (lambda h, x: (tanh(h, x), h, x), "pair"),
    ],
    ids=["wider", "narrower", "dtype", "structure", "no pair", "three"],
)
def test_carries_that_change(cell, match, way, xs, start):
    with pytest.raises(LowtideError, match=match):
        scan(cell, start, xs, **way)


@pytest.mark.parametrize("way", [*WAYS, {}], ids=str)
@pytest.mark.parametrize("reduce", [None, "sum", "mean"])
@pytest.mark.parametrize(
    "change", [lambda y: y.sum(), lambda y: y.float(), lambda y: (y,)], ids=["shape", "dtype", "structure"]
)
def test_outputs_that_change(change, reduce, way, xs, start):
    def cell(carry, x):
        h, n = carry
        h = tanh(h, x)
        return (h, n + 1), change(h) if n == 4 else h

    with pytest.raises(LowtideError, match="output changed"):
        scan(cell, (start, 0), xs, reduce=reduce, **way)


@pytest.mark.parametrize("way", [*WAYS, {}], ids=str)
def test_outputs_that_cannot_be_stacked_or_summed(way, xs, start):
    with pytest.raises(LowtideError, match="a float"):
        scan(lambda h, x: (tanh(h, x), 0.5), start, xs, **way)
    with pytest.raises(LowtideError, match="cannot be summed"):
        scan(lambda h, x: (tanh(h, x), h.argmax()), start, xs, reduce="sum", **way)


def cell(h, x):
    return tanh(h, x), h


LINE = torch.ones(3, 2, 4, dtype=F64)


@pytest.mark.parametrize("run", [scan, scan_plan])
@pytest.mark.parametrize(
    ("asked", "match"),
    [
        ({"xs": LINE[:0]}, "0 steps"),
        ({"xs": (LINE, LINE[:2])}, "do not agree"),
        ({"xs": LINE, "length": 4}, "do not agree"),
        ({"xs": torch.ones(())}, "time first"),
        ({"xs": [LINE, 3]}, "time first"),
        ({"xs": None}, "length="),
        ({"xs": None, "length": 0}, "length=0 must be a whole number >= 1"),
        ({"xs": LINE, "slots": 0}, "slot"),
        ({"xs": LINE, "slots": -1}, "slot"),
        ({"xs": LINE, "slots": 2, "budget": "1MiB"}, "both"),
        ({"xs": LINE, "slots": 2, "strategy": "best"}, "strategy"),
        ({"xs": LINE, "slots": 2, "reduce": "max"}, "reduce"),
        ({"xs": LINE, "slots": 2, "reduce": (torch.maximum,)}, "pair"),
        ({"xs": LINE, "slots": 2, "reduce": (1, LINE)}, "pair"),
        ({"xs": LINE, "slots": 2, "chunk": 0}, "chunk"),
        ({"xs": LINE, "slots": 2, "lengths": torch.tensor([3])}, "rows"),
        ({"xs": LINE, "slots": 2, "lengths": torch.tensor([3, 4])}, "3 steps"),
        ({"xs": LINE, "slots": 2, "lengths": torch.tensor([-1, 3])}, "3 steps"),
        ({"xs": LINE, "slots": 2, "lengths": torch.tensor([1.0, 3.0])}, "whole number"),
        ({"xs": LINE, "slots": 2, "lengths": [3, 3]}, "whole number"),
        ({"xs": LINE, "slots": 2, "lengths": torch.tensor([3, 3]), "reduce": (torch.add, LINE[0])}, "fold"),
        ({"xs": LINE, "budget": "auto"}, "budget|auto"),
        ({"xs": LINE, "budget": "lots"}, "budget|lots"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_arguments(run, asked, match, start):
    with pytest.raises(LowtideError, match=match):
        run(cell, start, **{"slots": 2} | asked if "budget" not in asked else asked)


def test_a_cell_that_cannot_be_called(start):
    with pytest.raises(LowtideError, match="callable"):
        scan(3, start, LINE)


def test_a_budget_that_is_too_small_changes_nothing():
    module, xs = Lstm(dropout=0.5), torch.randn(30, 2, 3, dtype=F64)
    before = torch.get_rng_state()
    with pytest.raises(BudgetTooSmall, match="smallest") as caught:
        scan(module, module.init(), xs, budget=17)
    assert isinstance(caught.value, BudgetError)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(parameter.grad is None for parameter in module.parameters())
    expected = gradients(lambda: plain(module, module.init(), xs), list(module.parameters()))
    way = {"budget": caught.value.smallest}
    got = gradients(lambda: scan(module, module.init(), xs, **way), list(module.parameters()))
    assert same(got, expected)


def test_nothing_to_plan(start):
    with pytest.raises(LowtideError, match="nothing to plan"):
        scan_plan(lambda h, x: (h + x, None), start, LINE, slots=2)


def test_errors_of_the_cell_come_through(start):
    class MyError(Exception):
        pass

    def fails(carry, x):
        h, n = carry
        if n == 2:
            raise MyError("mine")
        return (tanh(h, x), n + 1), None

    for way in (*WAYS, {}):
        with pytest.raises(MyError, match="mine"):
            scan(fails, (start, 0), LINE, **way)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        scan(lambda h, x: (h @ WEIGHT[:3], None), start, LINE, slots=2)
