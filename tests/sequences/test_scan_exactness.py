"""Scans against the plain loop in numbers: gradients, runs of the cell, bytes.

Gradients are bitwise those of the plain loop where each unit is one step (chunk=1) and a parameter is read
once in a step: sums over time are then formed in the same order. Where a step reads a parameter twice, or a
unit has several steps, autograd adds up within a unit first: equal to 1e-12 in float64.
"""

import random
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import lowtide
from lowtide.sequences import scan, scan_plan
from lowtide.solve.sequence import forward_count
from plain_loop import Lstm, gradients, plain, same

LENGTHS = (1, 2, 3, 7, 13, 37)


def largest(state, y):
    """A fold with a dict state: one leaf that gradients flow to, and a count."""
    return {"best": torch.maximum(state["best"], y), "steps": state["steps"] + 1}


def start_of_largest(rows=2):
    return {"best": torch.zeros(rows, 2, dtype=torch.float64), "steps": 0}


REDUCTIONS = (
    None,
    "sum",
    "mean",
    "last",
    (lambda state, y: state + y.pow(2).sum(), torch.zeros((), dtype=torch.float64)),
    (largest, start_of_largest()),
)
WAYS = (
    {"slots": 1},
    {"slots": 3, "strategy": "hidden"},
    {"slots": 1, "strategy": "internal"},
    {"slots": 4, "strategy": "internal"},
    {"slots": 2, "strategy": "mixed"},
    {"slots": 7, "strategy": "mixed"},
    {"budget": "min"},
    {"budget": "min", "strategy": "hidden"},
    {"budget": "100%"},
    {"budget": "1MiB", "strategy": "internal"},
    {"budget": None},
)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("length", LENGTHS)
def test_gradients_are_bitwise_those_of_the_plain_loop(length, way):
    number = length + WAYS.index(way)
    cell = Lstm(dropout=0.3 if number % 3 else 0.0)
    reverse, reduce = number % 2 == 1, REDUCTIONS[(length * 5 + WAYS.index(way)) % len(REDUCTIONS)]
    xs = torch.randn(length, 2, 3, dtype=torch.float64, requires_grad=True)
    init = tuple(leaf.requires_grad_() for leaf in cell.init())
    wanted = [*cell.parameters(), xs, *init]
    asked = {"reverse": reverse, "reduce": reduce}
    expected = gradients(lambda: plain(cell, init, xs, **asked), wanted)
    got = gradients(lambda: scan(cell, init, xs, **asked, **way), wanted)
    assert same(got[0], expected[0])
    assert same(got[1], expected[1])
    assert torch.equal(got[2], expected[2])  # the random state after it


@pytest.mark.slow
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("chunk", [1, 2, 5, 37, 99])
@pytest.mark.parametrize("reduce", [None, "mean", "last"])
def test_gradients_of_chunks_are_those_of_the_plain_loop(chunk, reverse, reduce):
    cell = Lstm(dropout=0.4)
    xs = torch.randn(13, 2, 3, dtype=torch.float64, requires_grad=True)
    asked = {"reverse": reverse, "reduce": reduce}
    wanted = [*cell.parameters(), xs]
    expected, cell.calls = gradients(lambda: plain(cell, cell.init(), xs, **asked), wanted), 0
    plan = scan_plan(cell, cell.init(), xs, chunk=chunk, slots=2, **asked)
    cell.calls = 0
    got = gradients(lambda: scan(cell, cell.init(), xs, chunk=chunk, slots=2, **asked), wanted)
    assert cell.calls == plan.forward_count
    assert same(got[0], expected[0])
    assert same(got[1], expected[1], 1e-12)
    assert torch.equal(got[2], expected[2])


def test_a_parameter_that_is_read_twice_in_a_step_gets_its_gradient_to_rounding():
    weight = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    xs = torch.randn(13, 2, 4, dtype=torch.float64)

    def cell(h, x):
        return torch.tanh(torch.tanh(h @ weight + x) @ weight), h.sum()

    start = torch.zeros(2, 4, dtype=torch.float64)
    expected = gradients(lambda: plain(cell, start, xs), [weight])
    for slots in (1, 2, 5):
        assert same(
            gradients(lambda slots=slots: scan(cell, start, xs, slots=slots), [weight])[1], expected[1], 1e-12
        )


@pytest.mark.slow
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("slots", [1, 2, 3, 6, 40])
@pytest.mark.parametrize("keep", ["hidden", "internal"])
def test_the_cell_runs_as_often_as_the_theory_says(length, slots, keep):
    weight, calls = torch.tensor(0.5, requires_grad=True), []

    def cell(h, x):
        calls.append(1)
        return h * weight + x, h

    carry, _ = scan(cell, torch.ones(()), torch.ones(length), slots=slots, strategy=keep)
    carry.backward()
    runs = len(calls)
    plan = scan_plan(cell, torch.ones(()), torch.ones(length), slots=slots, strategy=keep)
    assert runs == plan.forward_count == forward_count(length, slots, keep=keep)


def test_a_first_scan_that_keeps_all_runs_one_more_step_to_measure():
    cell, xs = Lstm(), torch.randn(5, 2, 3, dtype=torch.float64)
    for extra in (1, 0):
        cell.calls = 0
        scan(cell, cell.init(), xs, budget="100%")[1].sum().backward()
        assert cell.calls == 5 + extra


class Case:
    """A cell with its init, its inputs and how it is scanned, to be weighed."""

    def __init__(self, make, length, reduce=None, *, xs_grad=False, dtype=torch.float32):
        torch.manual_seed(0)
        self.cell, self.init, self.parameters = make(dtype)
        self.xs = torch.randn(length, 4, 5, dtype=dtype, requires_grad=xs_grad)
        self.wanted = [*self.parameters, *([self.xs] if xs_grad else [])]
        self.reduce = reduce
        self.calls = 0

    def run(self, carry, x):
        self.calls += 1
        return self.cell(carry, x)

    def outside(self, ys, tangents):
        """Bytes that are there anyway: what was given, outputs, and the gradients of both."""
        given = [*tree_leaves(self.init), self.xs, *self.parameters, *tangents]
        given = [leaf for leaf in given if isinstance(leaf, torch.Tensor)]
        held = {leaf.untyped_storage()._cdata: leaf.untyped_storage().nbytes() for leaf in given}
        return sum(held.values()) + sum(map(size, self.wanted)) + sum(map(size, tree_leaves(ys)))

    def difference(self, **way):
        """The measured peak less the predicted one."""
        plan = scan_plan(self.run, self.init, self.xs, reduce=self.reduce, **way)
        _, ys = scan(self.run, self.init, self.xs, reduce=self.reduce, **way)
        read = [leaf for leaf in tree_leaves(ys) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        tangents = [torch.randn_like(leaf) for leaf in read]
        outside, kept = self.outside(ys, tangents), []
        del ys, read
        self.calls = 0

        def step():
            ys = scan(self.run, self.init, self.xs, reduce=self.reduce, **way)[
                1
            ]  # the last carry is not held
            leaves = [
                leaf for leaf in tree_leaves(ys) if isinstance(leaf, torch.Tensor) and leaf.requires_grad
            ]
            kept.append(torch.autograd.grad(leaves, self.wanted, tangents))

        measured = lowtide.measure(step, device="cpu").peak
        assert self.calls == plan.forward_count
        assert plan.budget is None or plan.peak <= plan.budget
        return measured - outside - plan.peak


def size(leaf):
    return leaf.untyped_storage().nbytes() if isinstance(leaf, torch.Tensor) else 0


def lstm(dtype):
    cell, head = nn.LSTMCell(5, 6, dtype=dtype), nn.Linear(6, 3, dtype=dtype)

    def run(carry, x):
        carry = cell(x, carry)
        return carry, head(carry[0])

    return (
        run,
        (torch.zeros(4, 6, dtype=dtype), torch.zeros(4, 6, dtype=dtype)),
        [*cell.parameters(), *head.parameters()],
    )


def lstm_loss(dtype):
    run, init, parameters = lstm(dtype)

    def loss(carry, x):
        carry, y = run(carry, x)
        return carry, (y**2).mean()

    return loss, init, parameters


def gru_of_dropout(dtype):
    cell = nn.GRUCell(5, 6, dtype=dtype)

    def run(h, x):
        h = cell(nn.functional.dropout(x, 0.3), nn.functional.dropout(h, 0.5))
        return h, h.sum()

    return run, torch.zeros(4, 6, dtype=dtype), list(cell.parameters())


def counting(dtype):
    """Integers in the carry, a leaf that passes through, outputs in a dict."""
    weight = torch.randn(5, 5, dtype=dtype, requires_grad=True)

    def run(carry, x):
        h = torch.tanh(carry["h"] @ weight + x * carry["scale"])
        return {"h": h, "scale": carry["scale"], "n": carry["n"] + 1, "steps": carry["steps"] + 1}, {
            "mean": h.mean(0),
            "n": carry["n"] * 2,
        }

    init = {
        "h": torch.zeros(4, 5, dtype=dtype),
        "scale": torch.ones(5, dtype=dtype),
        "n": torch.zeros(3).long(),
    }
    return run, init | {"steps": 0}, [weight]


def halves(dtype):
    """A carry of views of one tensor; the output is the carry itself."""
    weight = torch.randn(10, 10, dtype=dtype, requires_grad=True)

    def run(carry, x):
        whole = torch.tanh(torch.cat(carry, 1) @ weight + torch.cat([x, x], 1))
        parts = whole.chunk(2, 1)
        return parts, parts[0]

    return run, (torch.zeros(4, 5, dtype=dtype), torch.zeros(4, 5, dtype=dtype)), [weight]


def itself(dtype):
    weight = torch.randn(5, 5, dtype=dtype, requires_grad=True)

    def run(h, x):
        h = torch.tanh(h @ weight + x)
        return h, h

    return run, torch.zeros(4, 5, dtype=dtype), [weight]


def leapfrog(dtype, view=False):
    """Leaves that move on from one place of the carry to another; the start is one tensor for both."""
    weight = torch.randn(5, 5, dtype=dtype, requires_grad=True)

    def run(carry, x):
        before, h = carry
        after = 2 * h - before + 0.01 * torch.sin(h @ weight + x)
        return (h[:] if view else h, after), after.square().mean()

    start = torch.zeros(4, 5, dtype=dtype)
    return run, (start, start), [weight]


def input_before(dtype):
    """The carry is the input of the step before, to which no gradient flows."""
    weight = torch.randn(5, 5, dtype=dtype, requires_grad=True)
    return (
        lambda before, x: (x, torch.sin(before @ weight * x).mean()),
        torch.zeros(4, 5, dtype=dtype),
        [weight],
    )


MAKERS = (lstm, lstm_loss, gru_of_dropout, counting, halves, itself)


@pytest.mark.slow
@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_the_predicted_peak_is_the_measured_one_to_the_byte(make):
    draw = random.Random(make.__name__)
    reductions = {counting: [None, "last"], itself: [None, "sum"]}.get(make, [None, "sum", "last"])
    differences = {}
    for length in (1, 2, 3, *draw.sample(range(4, 30), 2)):
        for way in (
            {"budget": "min"},
            {"budget": "100%"},
            {"budget": f"{draw.randint(30, 99)}%"},
            {"slots": 3},
        ):
            reduce = draw.choice(reductions)
            strategy = draw.choice(["auto", "hidden", "internal", "mixed"])
            dtype = draw.choice([torch.float32, torch.float64])
            case = Case(make, length, reduce, xs_grad=draw.random() < 0.5, dtype=dtype)
            try:
                found = case.difference(strategy=strategy, **way)
            except lowtide.BudgetTooSmall:
                continue
            differences[length, *way.items(), reduce, strategy] = found
    assert {case: found for case, found in differences.items() if found} == {}
    assert len(differences) >= 10


@pytest.mark.slow
@pytest.mark.parametrize("way", [{"budget": "min"}, {"budget": "60%"}, {"slots": 2}], ids=str)
@pytest.mark.parametrize("make", [lstm_loss, gru_of_dropout, halves], ids=lambda make: make.__name__)
def test_the_peak_of_chunks_is_exact_where_they_are_alike_and_a_bound_where_not(make, way):
    assert Case(make, 24, "sum").difference(chunk=4, **way) == 0
    assert Case(make, 23, "sum").difference(chunk=4, **way) <= 0


def nothing_carried(dtype):
    weight = torch.randn(5, 5, dtype=dtype, requires_grad=True)
    return lambda carry, x: (carry, torch.tanh(x @ weight).mean()), torch.zeros(4, 5, dtype=dtype), [weight]


@pytest.mark.parametrize("strategy", ["auto", "hidden", "internal", "mixed"])
def test_carries_without_bytes_are_kept_in_any_budget(strategy):
    for way in ({"budget": "min"}, {"budget": "50%"}):
        assert Case(nothing_carried, 13, "sum").difference(strategy=strategy, **way) == 0
    case = Case(nothing_carried, 13, "sum")
    assert scan_plan(case.run, case.init, case.xs, reduce="sum", budget="min").forward_count == 2 * 13 - 1


@pytest.mark.parametrize("xs_grad", [False, True])
def test_gradients_of_a_carry_that_leads_nowhere_are_not_held(xs_grad):
    cases = [Case(input_before, length, "sum", xs_grad=xs_grad) for length in (5, 13)]
    assert [case.difference(budget="min") for case in cases] == [0, 0]
    assert [case.difference(slots=3) for case in cases] == [0, 0]


@pytest.mark.slow
def test_leaves_that_move_count_with_every_carry_that_is_kept():
    """Carries that are kept side by side share such leaves: the prediction is a bound."""
    shares = ("20%", "40%", "70%")
    assert Case(leapfrog, 13, "sum").difference(budget="min") == 0
    assert [Case(leapfrog, 60, "sum").difference(budget=share) for share in shares] == [0, 0, 0]
    assert Case(leapfrog, 37, "sum").difference(slots=6, strategy="internal") <= 0
    assert Case(partial(leapfrog, view=True), 60, "sum").difference(budget="20%") == 0


@pytest.mark.slow
@pytest.mark.parametrize("way", [{"budget": "min"}, {"budget": "60%"}, {"slots": 2}], ids=str)
@pytest.mark.parametrize(("reduce", "weights"), [(None, 0), ("sum", 0), ("last", 1), ("mean", 8)])
def test_the_peak_with_lengths_is_exact_beside_their_masks(reduce, weights, way):
    lengths = torch.tensor([1, 19, 7, 0])
    masks = 19 * 4 * (1 + weights)  # which steps are inside, and with which weight
    assert Case(lstm, 19, reduce).difference(lengths=lengths, **way) == size(lengths) + masks


@pytest.mark.slow
def test_the_peak_of_a_mean_is_exact_beside_its_scaled_gradient():
    assert Case(lstm, 19, "mean").difference(budget="min") == 4 * 3 * 4


@pytest.mark.parametrize("way", [{"budget": "min"}, {"budget": "60%"}, {"slots": 2}], ids=str)
def test_the_peak_under_autocast_is_a_bound(way):
    """The copies of the weights that autocast makes count in each unit, though units share them."""

    def make(dtype):
        run, init, parameters = lstm_loss(dtype)
        return run, tuple(leaf.bfloat16() for leaf in init), parameters

    with torch.autocast("cpu", torch.bfloat16):
        assert Case(make, 19, "sum").difference(**way) <= 0


@pytest.mark.slow
def test_the_smallest_budget_is_named_and_works():
    case = Case(lstm_loss, 37, "sum")
    with pytest.raises(lowtide.BudgetTooSmall) as caught:
        scan(case.run, case.init, case.xs, reduce="sum", budget=100)
    smallest = caught.value.smallest
    assert case.difference(budget=smallest) == 0
    with pytest.raises(lowtide.BudgetTooSmall):
        scan_plan(case.run, case.init, case.xs, reduce="sum", budget=smallest - 1)


def test_sizes_are_measured_anew_where_they_change():
    case = Case(gru_of_dropout, 30)
    module = nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.5))

    def cell(h, x):
        return torch.tanh(module(h) + x), h.sum()

    def plan(fold=None):
        reduce = None if fold is None else (fold, torch.zeros(()))
        return scan_plan(cell, torch.zeros(4, 5), case.xs, budget="min", reduce=reduce).sizes

    training = plan()
    assert plan() is training
    module.eval()
    assert plan().start == 0 < training.start
    frozen_before = plan().backward
    module.requires_grad_(False)
    case.xs.requires_grad_()
    assert plan().backward < frozen_before
    wide = plan(lambda state, y: state + (y * torch.ones(1000)).sum())
    assert plan(lambda state, y: state + y).run < wide.run
