"""Loops of unknown length, against the plain while loop.

Values and gradients are compared bitwise where a step reads each parameter once, so that the sums have one
order, and to 1e-12 elsewhere.
"""

import gc
import weakref
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import lowtide
from lowtide.errors import BudgetError, BudgetTooSmall, LowtideError, UnsupportedBackward
from lowtide.sequences.ledger import peak_of
from lowtide.sequences.open_ended import while_scan
from lowtide.sequences.sizes import Sizes
from lowtide.solve.sequence import Forward, Pop, Push
from lowtide.solve.sequence.online import Online, finish, online_count

WIDTH = 6


class Counting:
    """h -> tanh(h W + b) with h and the number of steps as the carry; counts its runs."""

    def __init__(self, width=WIDTH, dropout=0.0):
        self.weight = nn.Parameter(torch.randn(width, width, dtype=torch.float64) / width**0.5)
        self.bias = nn.Parameter(torch.randn(width, dtype=torch.float64))
        self.start = torch.randn(3, width, dtype=torch.float64, requires_grad=True)
        self.dropout, self.runs, self.asked = dropout, 0, 0

    @property
    def init(self):
        return self.start, 0

    @property
    def wanted(self):
        return [self.start, self.weight, self.bias]

    def __call__(self, carry, x):
        assert x is None
        self.runs += 1
        h = torch.tanh(carry[0] @ self.weight + self.bias)
        h = nn.functional.dropout(h, self.dropout) if self.dropout else h
        return (h, carry[1] + 1), (h * h).sum(dim=1)

    def below(self, steps):
        def cond(carry):
            self.asked += 1
            assert not torch.is_grad_enabled()
            return carry[1] < steps

        return cond

    def gradients(self, carry, total=None):
        loss = (carry[0] ** 3).sum() + (0 if total is None else total)
        return torch.autograd.grad(loss, self.wanted, allow_unused=True)


def plain(cell, init, cond):
    carry, ys = init, []
    while True:
        with torch.no_grad():
            if not cond(carry):
                return carry, ys
        carry, y = cell(carry, None)
        ys.append(y)


def same(ones, others):
    return len(ones) == len(others) and all(
        (one is None and other is None) or torch.equal(one, other)
        for one, other in zip(ones, others, strict=True)
    )


@pytest.mark.slow
@pytest.mark.parametrize("slots", [None, 1, 2, 3, 5, 10])
@pytest.mark.parametrize("steps", [1, 2, 3, 7, 50, 301])
def test_values_gradients_and_runs_are_those_of_the_plain_loop(steps, slots):
    if slots == 1 and steps > 50:
        steps = 60  # the runs grow with the square
    cell = Counting()
    carry, ys = plain(cell, cell.init, cell.below(steps))
    expected = cell.gradients(carry, torch.stack(ys).square().sum())

    cell.runs = cell.asked = 0
    ours, stacked = while_scan(cell, cell.init, cell.below(steps), slots=slots)
    assert cell.runs == steps
    assert cell.asked == steps + 1
    assert torch.equal(ours[0], carry[0])
    assert ours[1] == steps
    assert torch.equal(stacked, torch.stack(ys))
    assert same(cell.gradients(ours, stacked.square().sum()), expected)
    assert cell.asked == steps + 1
    assert cell.runs == (steps if slots is None else online_count(steps, slots))


@pytest.mark.parametrize("slots", [1, 2, 3, 5, 10])
def test_no_step_runs_more_than_twice_again_within_the_bound(slots):
    runs = {}

    def cell(carry, _):
        runs[carry[1]] = runs.get(carry[1], 0) + 1
        return (carry[0] * 0.9, carry[1] + 1), None

    steps = (slots + 1) * (slots + 2) // 2 - 1
    start = torch.ones(2, requires_grad=True)
    (last, _), ys = while_scan(cell, (start, 0), lambda carry: carry[1] < steps, slots=slots)
    last.sum().backward()
    assert ys is None
    assert len(runs) == steps
    assert max(runs.values()) <= 3


@pytest.mark.parametrize("slots", [None, 1, 4])
@pytest.mark.parametrize("reduce", [None, "sum", "mean", "last"])
def test_no_step_at_all(reduce, slots):
    cell = Counting()
    carry, ys = while_scan(cell, cell.init, cell.below(0), slots=slots, reduce=reduce)
    assert carry[0] is cell.start
    assert ys is None
    assert (cell.runs, cell.asked) == (0, 1)


def test_no_step_of_a_fold():
    cell, start = Counting(), torch.zeros(3)
    carry, folded = while_scan(cell, cell.init, cell.below(0), reduce=(torch.maximum, start), budget="min")
    assert carry[0] is cell.start
    assert folded is start


@pytest.mark.parametrize("reduce", ["sum", "mean", "last", "fold"])
@pytest.mark.parametrize("slots", [None, 2, 30])
@pytest.mark.parametrize("steps", [1, 11])
def test_reduced_outputs(reduce, slots, steps):
    cell = Counting()
    start = torch.full((3,), 2.5, dtype=torch.float64, requires_grad=True)
    carry, ys = plain(cell, cell.init, cell.below(steps))
    stacked = torch.stack(ys)
    if reduce == "fold":
        whole = torch.maximum(start, stacked.amax(0))
    else:
        whole = {"sum": stacked.sum(0), "mean": stacked.mean(0), "last": stacked[-1]}[reduce]
    expected = cell.gradients(carry, whole.square().sum())

    how = (torch.maximum, start) if reduce == "fold" else reduce
    ours, folded = while_scan(cell, cell.init, cell.below(steps), slots=slots, reduce=how)
    torch.testing.assert_close(folded, whole, rtol=1e-12, atol=1e-12)
    found = cell.gradients(ours, folded.square().sum())
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_the_start_of_a_fold_gets_its_gradient():
    cell, start = Counting(), torch.ones(3, dtype=torch.float64, requires_grad=True)
    reduce = (lambda state, y: state * 0.5 + y, start)
    _, folded = while_scan(cell, cell.init, cell.below(3), slots=2, reduce=reduce)
    folded.sum().backward()
    assert torch.equal(start.grad, torch.full((3,), 0.125, dtype=torch.float64))


def step_of(cell, steps, wanted, **room):
    """One training step that lets go of all but the folded output."""

    def step():
        total = while_scan(cell, cell.init, cell.below(steps), reduce="sum", **room)[1]
        torch.autograd.grad(total, wanted, torch.ones_like(total))

    return step


def outside(cell):
    """Bytes beside the budget: init; parameters and the sum of the outputs with their gradients."""
    return cell.start.nbytes + 2 * (cell.weight.nbytes + cell.bias.nbytes + 3 * 8)


def smallest_budget(cell):
    with pytest.raises(BudgetTooSmall) as caught:
        while_scan(cell, cell.init, cell.below(9), reduce="sum", budget=1)
    assert str(caught.value.smallest) in str(caught.value)
    return caught.value.smallest, caught.value.parts


@pytest.mark.slow
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("slots", [1, 2, 3, 6, 11])
def test_the_peak_stays_within_the_budget(slots, dropout):
    cell = Counting(width=40, dropout=dropout)
    least, parts = smallest_budget(cell)
    budget = parts["one step"] + slots * parts["a carry"]
    assert budget - least == (slots - 1) * parts["a carry"]
    peaks = []
    for steps in (1, 2, 3, 7, 20, 90 if slots > 2 else 30):
        for room in ({"budget": budget + parts["a carry"] - 1}, {"slots": slots}):
            cell.runs = 0
            step = step_of(cell, steps, cell.wanted[1:], **room)
            peaks.append(lowtide.measure(step, device="cpu").peak - outside(cell))
            assert cell.runs == online_count(steps, slots)
    assert max(peaks) <= budget
    assert dropout or max(peaks) == budget  # no byte less could be promised


def test_the_smallest_budget_serves_and_is_that_of_min():
    cell = Counting(width=40)
    least, _ = smallest_budget(cell)
    with pytest.raises(BudgetTooSmall, match=str(least)):
        while_scan(cell, cell.init, cell.below(9), reduce="sum", budget=least - 1)
    for budget in ("min", least):
        cell.runs = 0
        peak = lowtide.measure(step_of(cell, 12, cell.wanted[1:], budget=budget), device="cpu").peak
        assert peak - outside(cell) <= least
        assert cell.runs == online_count(12, 1)


def test_a_condition_that_takes_more_than_a_step_counts():
    start = torch.ones(100, requires_grad=True)
    least = []
    for size in (1, 10_000):

        def cond(carry, size=size):
            return carry[1] < 5 and bool(torch.ones(size).sum() > 0)

        with pytest.raises(BudgetTooSmall) as caught:
            while_scan(lambda c, _: ((c[0] * 2, c[1] + 1), None), (start, 0), cond, budget=1)
        least.append(caught.value.parts["one step"])
    assert least[0] < 10_000 < 40_000 <= least[1]


@pytest.mark.parametrize(
    "sizes", [Sizes(8, 30, 50, 60, 8), Sizes(8, 9, 90, 40, 5), Sizes(58, 30, 50, 60, 8, 50)]
)
@pytest.mark.parametrize("slots", [1, 2, 3, 7])
def test_the_ledger_finds_no_more_than_the_slots_are_reckoned_with(slots, sizes):
    peaks = [peak_of(whole(steps, slots), sizes) for steps in range(1, 80)]
    assert max(peaks) == slots * sizes.state + sizes.work - sizes.start


def whole(steps, slots):
    """All actions of a loop, with carries that are kept for a while only."""
    online = Online(slots)
    for state in range(steps):
        choice = online.leave(state)
        if choice.free is not None:
            yield Pop(choice.free)
        if choice.keep and state:
            yield Push(state)
        yield Forward(state, state + 1)
    yield from finish(online.kept, steps, slots)


@pytest.mark.parametrize("slots", [1, 2, 5])
def test_carries_that_are_there_while_the_loop_runs(slots):
    alive, most = set(), []

    def cell(carry, _):
        most.append(len(alive))
        h = carry[0] * 0.5
        storage = h.untyped_storage()
        alive.add(carry[1])
        weakref.finalize(storage, alive.discard, carry[1])
        return (h, carry[1] + 1), None

    start = torch.ones(4, requires_grad=True)
    total = while_scan(cell, (start, 0), lambda carry: carry[1] < 40, slots=slots)[0][0].sum()
    assert len(most) == 40
    assert max(most) == slots  # the kept ones beside the start, and the one that the step starts from
    assert len(alive) == slots - 1
    total.backward()
    assert max(most) <= slots
    assert not alive


def test_closed_over_results_and_hooks_get_their_gradients():
    base = torch.tensor([0.3, -0.2], dtype=torch.float64, requires_grad=True)
    hooked = torch.tensor([0.5, 0.7], dtype=torch.float64, requires_grad=True)
    seen = []
    hooked.register_hook(lambda gradient: seen.append(gradient.clone()))

    def loss(slots):
        made = base.exp()
        cell = lambda c, _: ((torch.sin(c[0] * made + hooked), c[1] + 1), None)  # noqa: E731
        carry, _ = while_scan(cell, (torch.ones(2, dtype=torch.float64), 0), lambda c: c[1] < 13, slots=slots)
        return carry[0].sum()

    expected = torch.autograd.grad(loss(None), [base, hooked])
    del seen[:]
    found = torch.autograd.grad(loss(3), [base, hooked])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert len(seen) == 1


def test_a_parameter_read_later_only_is_named():
    early, late = (torch.tensor(value, requires_grad=True) for value in (0.5, 2.0))
    hidden = SimpleNamespace(late=late)  # an object that nobody looks into

    def cell(carry, _):
        return (carry[0] * (hidden.late if carry[1] > 3 else early), carry[1] + 1), None

    def last(**options):
        return while_scan(cell, (torch.ones(()), 0), lambda carry: carry[1] < 6, slots=2, **options)[0][0]

    with pytest.raises(LowtideError, match=r"parameters=\[tensor\]"):
        last().backward()
    last(parameters=[late]).backward()
    assert late.grad.item() == 2 * 2.0 * 0.5**4
    assert early.grad.item() == 2.0**2 * 4 * 0.5**3


@pytest.mark.parametrize("room", [{"slots": 1}, {"slots": 3}, {"budget": 200_000}])
def test_dropout_is_replayed(room):
    cell = Counting(dropout=0.4)
    torch.manual_seed(3)
    carry, ys = plain(cell, cell.init, cell.below(23))
    after = torch.get_rng_state()
    expected = cell.gradients(carry, torch.stack(ys).sum())

    torch.manual_seed(3)
    ours, stacked = while_scan(cell, cell.init, cell.below(23), **room)
    assert torch.equal(torch.get_rng_state(), after)
    found = cell.gradients(ours, stacked.sum())
    assert torch.equal(torch.get_rng_state(), after)
    assert torch.equal(stacked, torch.stack(ys))
    assert same(found, expected)


def test_random_numbers_from_a_later_step_on_need_a_word():
    def cell(carry, _):
        h, n = carry
        return (nn.functional.dropout(h, 0.5) * h if n > 2 else h * 1.1, n + 1), None

    start = torch.ones(8, dtype=torch.float64, requires_grad=True)

    def gradient(**options):
        torch.manual_seed(0)
        last = while_scan(cell, (start, 0), lambda carry: carry[1] < 9, **options)[0][0]
        return torch.autograd.grad(last.sum(), start)[0]

    with pytest.raises(LowtideError, match="random=True"):
        gradient(slots=2)
    assert torch.equal(gradient(slots=2, random=True), gradient())


def test_newton_with_a_tolerance():
    a = torch.tensor([2.0, 9.0, 1e4], dtype=torch.float64, requires_grad=True)
    cell = lambda x, _: ((x + a / x) / 2, None)  # noqa: E731
    root, ys = while_scan(cell, torch.ones_like(a), lambda x: ((x * x - a).abs() > 1e-9).any(), slots=3)
    assert ys is None
    root.sum().backward()
    torch.testing.assert_close(root, a.sqrt(), rtol=1e-12, atol=0)
    torch.testing.assert_close(a.grad, 0.5 / a.detach().sqrt(), rtol=1e-9, atol=0)


@pytest.mark.parametrize("room", [{"slots": 2}, {"slots": 6}, {"budget": "min"}, {"budget": "8KiB"}])
def test_a_fixed_point_solver(room):
    torch.manual_seed(1)
    layer, x = nn.Linear(5, 5, dtype=torch.float64), torch.randn(2, 5, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.mul_(0.8)

    def cell(carry, _):
        z = carry["z"]
        new = torch.tanh(layer(z) + x)
        return {"z": new, "moved": (new - z).detach().abs().max()}, new.norm()

    def cond(carry):
        return carry["moved"] > 1e-8

    init = {"z": torch.zeros_like(x), "moved": torch.tensor(1.0, dtype=torch.float64)}
    carry, ys = plain(cell, init, cond)
    expected = torch.autograd.grad(carry["z"].sum() + torch.stack(ys).sum(), layer.parameters())
    ours, total = while_scan(cell, init, cond, reduce="sum", **room)
    assert len(ys) > 10
    assert torch.equal(ours["z"], carry["z"])
    assert not ours["moved"].requires_grad
    assert same(torch.autograd.grad(ours["z"].sum() + total, layer.parameters()), expected)


class BrokenError(Exception):
    pass


def tensors():
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


@pytest.mark.slow
@pytest.mark.parametrize("at", [0, 8])
def test_a_cell_that_raises_leaves_nothing_behind(at):
    cell, below = Counting(dropout=0.5), Counting.below

    def breaks(carry, x):
        result = cell(carry, x)
        if carry[1] == at:
            raise BrokenError
        return result

    before = tensors()
    states = []
    for room in ({}, {"slots": 3}, {"budget": 100_000}):
        torch.manual_seed(5)
        with pytest.raises(BrokenError):
            while_scan(breaks, cell.init, below(cell, 20), **room)
        states.append(torch.get_rng_state())
    assert all(torch.equal(one, other) for one, other in pairwise(states))
    del states
    assert tensors() == before
    assert torch.is_grad_enabled()


@pytest.mark.slow
def test_a_cell_that_raises_in_the_backward_leaves_nothing_behind():
    cell, broken = Counting(dropout=0.5), []

    def breaks(carry, x):
        if broken and carry[1] == 4:
            raise BrokenError
        return cell(carry, x)

    before = tensors()
    carry = while_scan(breaks, cell.init, cell.below(20), slots=3, reduce="sum")[0]
    state = torch.get_rng_state()
    broken.append(True)
    with pytest.raises(BrokenError):
        carry[0].sum().backward()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(leaf.grad is None for leaf in cell.wanted)
    del carry, state
    assert tensors() == before


@pytest.mark.slow
@pytest.mark.parametrize("reduce", [None, "sum", "last"])
def test_a_loop_without_backward_is_freed(reduce):
    cell = Counting()
    before = tensors()
    for _ in range(3):
        while_scan(cell, cell.init, cell.below(20), slots=3, reduce=reduce)
    assert tensors() == before


@pytest.mark.parametrize("slots", [None, 3])
@pytest.mark.parametrize("answer", [None, 1, "yes", torch.ones(2), torch.ones(0), [True]])
def test_a_condition_of_another_kind_is_refused(answer, slots):
    cell = Counting()
    for at in (0, 3):
        with pytest.raises(LowtideError, match="bool or a tensor of one element"):
            while_scan(cell, cell.init, lambda c, at=at: answer if c[1] == at else c[1] < 9, slots=slots)


@pytest.mark.parametrize("answer", [torch.tensor(True), torch.ones(1, 1), torch.tensor([3])])
def test_a_condition_may_be_a_tensor_of_one_element(answer):
    cell = Counting()
    _, ys = while_scan(cell, cell.init, lambda carry: answer if carry[1] < 4 else False, slots=2)
    assert ys.shape == (4, 3)


@pytest.mark.parametrize("slots", [None, 3])
def test_a_condition_that_changes_the_carry_is_refused(slots):
    cell = Counting()
    with pytest.raises(LowtideError, match="cond changes the carry"):
        while_scan(cell, cell.init, lambda carry: bool((carry[0].add_(1) > 0).any()), slots=slots)


def test_a_condition_that_draws_random_numbers_is_refused():
    cell = Counting(dropout=0.5)
    with pytest.raises(LowtideError, match="cond draws random numbers"):
        while_scan(cell, cell.init, lambda carry: torch.rand(()) < 2, slots=2, max_steps=50)


@pytest.mark.parametrize("room", [{}, {"slots": 3}, {"budget": "1MiB"}])
def test_max_steps(room):
    cell = Counting()
    _, ys = while_scan(cell, cell.init, cell.below(9), max_steps=9, **room)
    assert len(ys) == 9
    cell.runs = 0
    with pytest.raises(LowtideError, match="max_steps=8"):
        while_scan(cell, cell.init, cell.below(9), max_steps=8, **room)
    assert cell.runs == 8


@pytest.mark.parametrize("room", [{"slots": 2}, {"budget": "min"}])
def test_without_gradients_every_step_runs_once(room):
    cell = Counting()
    with torch.no_grad():
        carry, ys = while_scan(cell, cell.init, cell.below(12), **room)
    assert not carry[0].requires_grad
    assert not ys.requires_grad
    for leaf in cell.wanted:
        leaf.requires_grad_(False)
    again, more = while_scan(cell, cell.init, cell.below(12), **room)
    assert cell.runs == 24
    assert torch.equal(carry[0], again[0])
    assert torch.equal(ys, more)


def test_outputs_may_be_trees_with_none_in_them_and_parts_of_larger_tensors():
    def cell(carry, _):
        h, n = carry
        both = torch.stack([h * 0.5, h * 2])
        return (both[0], n + 1), {"double": both[1], "nothing": None, "count": torch.tensor(n)}

    start = torch.ones(3, dtype=torch.float64, requires_grad=True)
    _, ys = while_scan(cell, (start, 0), lambda carry: carry[1] < 5, slots=2)
    assert ys["nothing"] is None
    assert ys["count"].tolist() == [0, 1, 2, 3, 4]
    assert ys["double"][:, 0].tolist() == [2, 1, 0.5, 0.25, 0.125]
    ys["double"].sum().backward()
    assert start.grad.tolist() == [3.875] * 3


def test_an_output_does_not_hold_the_larger_tensor_that_it_is_part_of():
    def cell(carry, _):
        large = (carry[0] * 0.5).repeat(1000)
        return (large[:2].clone(), carry[1] + 1), large[:1]

    start = torch.ones(2, requires_grad=True)

    def step():
        while_scan(cell, (start, 0), lambda carry: carry[1] < 50, slots=2)

    assert lowtide.measure(step, device="cpu").peak < 3 * 8000


def test_a_second_backward_is_refused():
    cell = Counting()
    carry, _ = while_scan(cell, cell.init, cell.below(5), slots=2)
    loss = carry[0].sum()
    loss.backward(retain_graph=True)
    with pytest.raises(UnsupportedBackward, match="retain_graph"):
        loss.backward()


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"slots": 2, "budget": "1MiB"}, LowtideError, "both given"),
        ({"slots": 0}, LowtideError, "slots=0"),
        ({"budget": "5%"}, BudgetError, "how many steps"),
        ({"budget": "free"}, BudgetError, "not known to a loop"),
        ({"budget": -3}, BudgetError, "not above zero"),
        ({"max_steps": 0}, LowtideError, "max_steps=0"),
        ({"max_steps": True}, LowtideError, "max_steps=True"),
        ({"reduce": "max"}, LowtideError, "reduce='max'"),
        ({"reduce": (1, 2)}, LowtideError, r"reduce=\(1, 2\)"),
    ],
)
def test_refusals(options, error, words):
    cell = Counting()
    with pytest.raises(error, match=words):
        while_scan(cell, cell.init, cell.below(3), **options)
    assert (cell.runs, cell.asked) == (0, 0)


@pytest.mark.parametrize("slots", [None, 2])
def test_cells_that_cannot_be_looped(slots):
    start = torch.ones(3, requires_grad=True)

    def refused(cell, words):
        with pytest.raises(LowtideError, match=words):
            while_scan(cell, (start, 0), lambda carry: carry[1] < 5, slots=slots)

    refused(7, "callable")
    refused(lambda carry, _: carry, "pair|structure")
    refused(lambda carry, _: ((carry[0].double(), carry[1] + 1), None), "leaf 0 of its carry")
    refused(lambda carry, _: ((carry[0] * 2, carry[1] + 1), "text"), "only tensors and None")
    refused(lambda carry, _: ((carry[0] * 2, carry[1] + 1), torch.ones(1 + carry[1])), "output changed")
    with pytest.raises(LowtideError, match="cond is a int"):
        while_scan(lambda carry, _: (carry, None), start, 3)


def test_a_budget_that_is_too_small_leaves_the_random_state():
    cell = Counting(dropout=0.5)
    state = torch.get_rng_state()
    with pytest.raises(BudgetTooSmall):
        while_scan(cell, cell.init, cell.below(9), budget=10)
    assert torch.equal(torch.get_rng_state(), state)
