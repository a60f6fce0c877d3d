"""Scans in graphs, with a stand-in for CUDA's (`captures` in conftest.py).

What CUDA itself does is in test_gpu.py.
"""

import pytest
import torch
from torch import nn

import lowtide
from lowtide import LowtideError
from lowtide.sequences import scan, scan_plan
from plain_loop import Lstm, check, plain, same, step

BUDGET = "60%"


@pytest.fixture
def start(start):
    return start.requires_grad_()


def long(xs, steps):
    return xs.detach().repeat(steps // len(xs) + 1, *[1] * (xs.ndim - 1))[:steps].clone()


@pytest.mark.slow
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("steps", [64, 61, 32])
@pytest.mark.parametrize("reduce", [None, "sum", "mean", "last", "fold"])
def test_gradients_are_those_of_the_loop(reduce, steps, reverse, captures, weight, xs, start):
    xs = long(xs, steps).requires_grad_()
    if reduce == "fold":
        reduce = (lambda state, y: state + y.sum(), torch.zeros((), dtype=xs.dtype))
    wanted = [weight, xs, start]
    scanned = {"budget": BUDGET}
    check(
        lambda: step(weight), start, xs, wanted, tolerance=0, scanned=scanned, reduce=reduce, reverse=reverse
    )
    assert len(captures["launched"]) == 2
    assert min(captures["launched"]) > 1


def test_dropout_is_drawn_as_in_the_loop(captures, weight, xs, start):
    drop = nn.Dropout(0.4)

    def dropping():
        def cell(h, x):
            h = torch.tanh(drop(h) @ weight + drop(x))
            return h, h.sum()

        return cell

    check(dropping, start, long(xs, 50), [weight, start], tolerance=0, scanned={"budget": "100KiB"})
    assert captures["launched"]


@pytest.mark.slow
@pytest.mark.parametrize("steps", [96, 93])
def test_peak_and_runs_are_as_planned(steps, captures, weight, xs, start):
    xs, cell = long(xs, steps), step(weight)
    options = {"budget": "40%", "reduce": "sum"}
    plan = scan_plan(cell, start, xs, **options)
    assert plan.graphs
    assert plan.peak <= plan.budget < plan.keep_all
    scan(cell, start, xs, **options)[1].sum().backward()  # to have its gradients there
    peak = lowtide.measure(lambda: scan(cell, start, xs, **options)[1].sum().backward(), device="cpu")
    given = [xs, weight, weight.grad, weight.grad, start, start.grad]
    outside = sum(tensor.numel() * tensor.itemsize for tensor in given if tensor is not None)
    assert peak.peak <= plan.peak + outside + 1024
    forward, back = captures["launched"][:2]
    assert plan.chunk * (forward + back) + steps % plan.chunk == plan.forward_count


@pytest.mark.slow
def test_a_leaf_that_stays_counts_with_every_carry_that_is_kept(captures, weight, xs, start):
    """Its place in a chunk is written over, so that every carry that is kept has a copy of it."""
    xs, memory = long(xs, 96), torch.ones(16, *start.shape, dtype=start.dtype)

    def cell(carry, x):
        h, memory = carry
        h = torch.tanh((h + memory.mean(0)) @ weight + x)
        return (h, memory), h.sum()

    for budget in ("60%", "40%"):
        options = {"budget": budget, "reduce": "sum"}
        plan = scan_plan(cell, (start, memory), xs, **options)
        scan(cell, (start, memory), xs, **options)[1].backward()  # to have its gradients there
        peak = lowtide.measure(
            lambda: scan(cell, (start, memory), xs, **options)[1].backward(),  # noqa: B023  # at once
            device="cpu",
        ).peak
        given = [xs, memory, weight, weight.grad, weight.grad, start, start.grad]
        assert peak <= plan.budget + sum(tensor.numel() * tensor.itemsize for tensor in given) + 1024
    assert captures["launched"]


def test_a_shorter_last_chunk_makes_no_more_weight_gradients_at_a_time(captures):
    """They are of the size of the weight: summed up by autograd, there would be two at a time."""
    cell, xs = nn.RNNCell(2, 64, dtype=torch.float64), torch.rand(47, 1, 2, dtype=torch.float64)

    def one(h, x):
        h = cell(x, h)
        return h, h.square().sum()

    init, options = torch.zeros(1, 64, dtype=torch.float64), {"reduce": "sum", "budget": "120KiB", "chunk": 8}
    plan = scan_plan(one, init, xs, **options)
    assert plan.graphs
    scan(one, init, xs, **options)[1].backward()
    measured = lowtide.measure(lambda: scan(one, init, xs, **options)[1].backward(), device="cpu").peak
    weights = sum(weight.numel() * weight.itemsize for weight in cell.parameters())
    outside = 3 * weights + sum(tensor.numel() * tensor.itemsize for tensor in (xs, init))
    assert abs(measured - plan.peak - outside) < 1024 < weights


def test_more_memory_means_fewer_runs(captures):
    cell, xs = Lstm(), torch.rand(200, 2, 3, dtype=torch.float64)
    plans = [
        scan_plan(cell, cell.init(), xs, reduce="sum", budget=f"{share}%") for share in (8, 15, 30, 60, 100)
    ]
    assert [plan.forward_count for plan in plans] == sorted((p.forward_count for p in plans), reverse=True)
    assert plans[-1].graphs


@pytest.mark.parametrize("steps", [64, 61])
@pytest.mark.parametrize("which", [0, 1], ids=["forward", "backward"])
def test_a_cell_that_cannot_be_captured_runs_step_by_step(which, steps, captures, weight, xs, start):
    captures["error"], captures["from"] = RuntimeError("operation not permitted"), which
    scanned = {"budget": BUDGET, "chunk": 4}
    check(lambda: step(weight), start, long(xs, steps), [weight, start], tolerance=0, scanned=scanned)
    assert len(captures["launched"]) == which


def test_that_it_cannot_be_captured_is_remembered(captures, weight, xs, start):
    captures["error"], xs, cell = RuntimeError("operation not permitted"), long(xs, 64), step(weight)
    assert scan_plan(cell, start, xs, budget=BUDGET).graphs
    scan(cell, start, xs, budget=BUDGET)
    assert not scan_plan(cell, start, xs, budget=BUDGET).graphs
    with pytest.raises(LowtideError, match=r"could not be captured \(operation not permitted"):
        scan(cell, start, xs, budget=BUDGET, graphs=True)


def test_what_is_asked_for_is_done_or_refused(captures, weight, xs, start):
    xs, cell = long(xs, 64), step(weight)
    assert not scan_plan(cell, start, xs, budget=BUDGET, graphs=False).graphs
    assert scan_plan(cell, start, xs, budget=BUDGET, chunk=4).chunk == 4
    with pytest.raises(LowtideError, match="no budget"):
        scan_plan(cell, start, xs, slots=3, graphs=True)
    with pytest.raises(LowtideError, match="no chunk of its steps fits"):
        scan_plan(cell, start, xs, budget="min", graphs=True)
    with pytest.raises(LowtideError, match="must be True"):
        scan_plan(cell, start, xs, budget=BUDGET, graphs="always")


def test_without_a_gpu_it_is_refused(weight, xs, start):
    with pytest.raises(LowtideError, match="not on a CUDA device"):
        scan(step(weight), start, long(xs, 64), budget=BUDGET, graphs=True)


def test_a_carry_that_holds_a_number_runs_step_by_step(captures, weight, xs, start):
    def counting(carry, x):
        h, count = carry
        h, y = step(weight)(h, x)
        return (h, count + 1), y

    (_, count), _ = scan(counting, (start, 0), long(xs, 64), budget="80%")
    assert count == 64
    assert not captures["launched"]


def test_counters_in_the_carry_stay_exact(captures, weight, xs, start):
    def counting():
        def cell(carry, x):
            h, count = carry
            h, y = step(weight)(h, x)
            return (h * (1 + count / 100), count + 1), y

        return cell

    init = (start, torch.zeros((), dtype=torch.int64))
    check(counting, init, long(xs, 64), [weight, start], tolerance=0, scanned={"budget": BUDGET})
    assert captures["launched"]


def test_an_unused_start_gets_no_gradient(captures, weight, xs, start):
    def cell(carry, x):
        h, unused = carry
        return (torch.tanh(h @ weight + x), torch.zeros_like(unused)), h.sum()

    unused = torch.ones(3, dtype=start.dtype, requires_grad=True)
    results = []
    for run in (plain, lambda *args, **options: scan(*args, budget=BUDGET, **options)):
        _, total = run(cell, (start, unused), long(xs, 64), reduce="sum")
        results.append(torch.autograd.grad(total, [weight, start, unused], allow_unused=True))
    assert results[0][2] is results[1][2] is None
    assert same(results[1][:2], results[0][:2])


@pytest.mark.slow
@pytest.mark.parametrize("reduce", [None, "mean", "last"])
def test_rows_of_different_lengths(reduce, captures):
    cell, xs = Lstm(), torch.rand(48, 3, 3, dtype=torch.float64, requires_grad=True)
    lengths = torch.tensor([48, 17, 30])
    found = []
    for graphs in (True, False):
        options = {"budget": "70%", "graphs": graphs, "reduce": reduce, "lengths": lengths}
        carry, ys = scan(cell, cell.init(3), xs, **options)
        loss = carry[0].sum() + ys.square().sum()
        found.append((carry, ys, torch.autograd.grad(loss, [xs, *cell.parameters()])))
    assert same(found[0], found[1])
    assert captures["launched"]


def test_steps_without_inputs(captures, weight, start):
    def cell(h, _):
        return torch.tanh(h @ weight), {"y": h.sum()}

    found = []
    for graphs in (True, False):
        carry, ys = scan(cell, start, length=50, budget=BUDGET, graphs=graphs)
        found.append((carry, ys, torch.autograd.grad(ys["y"].square().sum(), [weight, start])))
    assert same(found[0], found[1])
    assert captures["launched"]
