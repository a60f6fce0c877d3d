"""Random numbers: as many as in plain eager, in the same order of memory, in the forward and the backward."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import lowtide
from one_capture import one_capture

BUDGETS = ("100%", "min")

LAYOUTS = {
    "contiguous": lambda x: x * 1.0,
    "transposed": lambda x: x.transpose(1, 2) * 1.0,
    "channels_last": lambda x: x.to(memory_format=torch.channels_last) * 1.0,
    "sliced": lambda x: (x * 1.0).permute(3, 0, 2, 1)[1:, :, ::2],
}


def filled(method, *args):
    """Noise of a tensor's layout, drawn in place."""

    def op(x):
        noise = torch.zeros_like(x)
        getattr(noise, method)(*args)
        return x * noise

    return op


def filled_view(method, *args):
    """Noise drawn into a part of a transposed tensor."""

    def op(x):
        base = torch.zeros(3, 7, 5, dtype=x.dtype)
        getattr(base.transpose(0, 2)[:, 1::2], method)(*args)
        return x * base.sum()

    return op


def product_in_place(x):
    """What is written into a transposed tensor keeps its strides, which the dropout after it follows."""
    flat = x.flatten(0, 2).t().contiguous().t() * 1.0
    nothing = torch.zeros(flat.shape[1], flat.shape[1], dtype=x.dtype)  # so that nothing is rounded
    flat.addmm_(flat.detach(), nothing)
    return functional.dropout(flat, 0.3)


OPS = {
    "dropout": lambda x: functional.dropout(x, 0.3),
    "dropout in place": lambda x: functional.dropout(x, 0.3, inplace=True),
    "dropout of everything": lambda x: functional.dropout(x, 1.0),
    "alpha dropout": lambda x: functional.alpha_dropout(x, 0.3, training=True),
    "alpha dropout in place": lambda x: functional.alpha_dropout(x, 0.3, training=True, inplace=True),
    "feature alpha dropout": lambda x: functional.feature_alpha_dropout(x, 0.3, training=True),
    "dropout2d": lambda x: functional.dropout2d(x, 0.3, inplace=True),
    "rrelu": lambda x: functional.rrelu(x, training=True),
    "rrelu in place": lambda x: functional.rrelu(x, training=True, inplace=True),
    "bernoulli": lambda x: x * torch.bernoulli(torch.sigmoid(x.detach())),
    "bernoulli of a number": lambda x: x * torch.bernoulli(x.detach(), 0.4),
    "bernoulli_": filled("bernoulli_", 0.3),
    "uniform_": filled("uniform_", -1.0, 2.0),
    "normal_": filled("normal_", 0.5, 2.0),
    "exponential_": filled("exponential_", 2.0),
    "geometric_": filled("geometric_", 0.3),
    "bernoulli_ of a view": filled_view("bernoulli_", 0.3),
    "normal_ of a view": filled_view("normal_"),
    "rand_like": lambda x: x * torch.rand_like(x),
    "randn_like": lambda x: x * torch.randn_like(x),
    "randint_like": lambda x: x * torch.randint_like(x, 9),
    "gumbel_softmax": lambda x: functional.gumbel_softmax(x, tau=0.7, hard=True, dim=1),
    "attention": lambda x: functional.scaled_dot_product_attention(x, x, x, dropout_p=0.3),
    "drop path": lambda x: x * x.new_empty(len(x), 1, 1, 1).bernoulli_(0.7).div_(0.7),
    "a gamma variable": lambda x: x * torch.distributions.Gamma(x.exp(), 1.0, validate_args=False).rsample(),
    "a product in place": product_in_place,
}

UNREAD = {
    "dropout": lambda x: functional.dropout(x, 0.5),
    "dropout in place": lambda x: functional.dropout(x.clone(), 0.5, inplace=True),
    "alpha dropout": lambda x: functional.alpha_dropout(x, 0.5, training=True),
    "rand": lambda x: torch.rand(5),
    "randperm": lambda x: torch.randperm(7),
    "randint": lambda x: torch.randint(5, (7,)),
    "normal": lambda x: torch.normal(x.detach(), 2.0),
    "uniform_": lambda x: torch.empty(7).uniform_(),
    "multinomial": lambda x: torch.multinomial(torch.ones(5), 2),
    "attention": lambda x: functional.scaled_dot_product_attention(x, x, x, dropout_p=0.3),
    "a chain": lambda x: torch.sin(functional.dropout(torch.sin(x), 0.5)).sum(),
    "rrelu": lambda x: functional.rrelu(x, training=True),
}


def outcome(step, budget, dtype=torch.float32, steps=2):
    """All that a step leaves behind, over several of them: results, gradients, states between and after."""
    torch.manual_seed(1)
    x = torch.randn(4, 5, 6, 7).to(dtype).requires_grad_()
    w = torch.randn(7).to(dtype).requires_grad_()
    run = step if budget is None else lowtide.cap(step, budget)
    torch.manual_seed(3)
    left = []
    for _ in range(steps):
        x.grad = w.grad = None
        results = run(x, w)
        loss, *others = results if isinstance(results, tuple) else (results,)
        left += [loss.detach().clone(), *(other.detach().clone() for other in others), torch.get_rng_state()]
        torch.rand(1)  # somebody else draws between the forward and the backward
        loss.backward()
        left += [x.grad, w.grad, torch.get_rng_state()]
    return left


def assert_as_in_eager(step, budgets=BUDGETS, dtype=torch.float32):
    plain = outcome(step, None, dtype)
    with one_capture():
        outcomes = [outcome(step, budget, dtype) for budget in budgets]
    for left in outcomes:
        for expected, found in zip(plain, left, strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def weighted(x):
    """A sum that tells elements apart, after a dropout that shows what was drawn before it."""
    x = functional.dropout(torch.sin(x.float()), 0.4)
    return (x * torch.arange(1.0, x.numel() + 1).view(x.shape).sin()).sum()


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
def test_numbers_are_drawn_in_the_order_of_eager(op):
    """One step draws for all layouts: their sums are compared one by one, their gradients in one."""

    def step(x, w):
        y = torch.sin(x * w)
        found = [weighted(OPS[op](layout(y))) for layout in LAYOUTS.values()]
        return sum(found), *(each.detach() for each in found)

    assert_as_in_eager(step)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("op", ["dropout in place", "dropout of everything", "alpha dropout", "bernoulli_"])
def test_the_order_does_not_depend_on_the_dtype(op, dtype):
    def step(x, w):
        return weighted(OPS[op](LAYOUTS["transposed"](torch.sin(x * w))))

    assert_as_in_eager(step, dtype=dtype)


@pytest.mark.slow
@pytest.mark.parametrize("op", UNREAD)
def test_numbers_that_nobody_reads_are_drawn(op):
    def step(x, w):
        y = torch.sin(x * w)
        UNREAD[op](y)
        return weighted(y)

    assert_as_in_eager(step)


@pytest.mark.slow
def test_an_unread_draw_is_an_op_whose_bytes_are_freed_at_once():
    def step(x, w):
        torch.rand(1000)
        return weighted(torch.sin(x * w))

    plan = lowtide.plan(step, torch.randn(4, 5, 6, 7), torch.randn(7, requires_grad=True))
    (rand,) = (op for op in plan.graph.ops if op.target == "aten.rand.default")
    assert (rand.workspace, rand.writes, rand.kind, rand.phase) == (4000, (), "pinned", "forward")
    found = lowtide.verify(step, torch.randn(4, 5, 6, 7), torch.randn(7, requires_grad=True), budget="min")
    assert found.verdict == "yes"
    assert found.measured == found.predicted


class Noisy(torch.autograd.Function):
    """Its backward draws: numbers that nobody reads, some that depend on no gradient, some like it."""

    @staticmethod
    def forward(ctx, x):
        torch.rand(2)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        torch.rand(3)
        return grad * torch.rand(grad.shape) + torch.rand_like(grad)


class Quiet(torch.autograd.Function):
    """Its backward draws only numbers that nobody reads."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        torch.rand(3)
        return grad * 2


@pytest.mark.slow
@pytest.mark.parametrize("function", [Noisy, Quiet])
def test_a_backward_draws_when_it_runs(function):
    def inside(x, w):
        return weighted(function.apply(torch.sin(functional.dropout(x * w, 0.3))))

    def last(x, w):
        return function.apply(weighted(functional.dropout(x * w, 0.3)))

    def without_gradient(x, w):
        return weighted(functional.dropout(x * w, 0.3)), function.apply(torch.sin(x * w))

    for step in (inside, last, without_gradient):
        assert_as_in_eager(step)


@pytest.mark.slow
def test_modules_draw_in_the_order_of_eager():
    torch.manual_seed(0)
    layers = nn.ModuleList([nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3), nn.Dropout(0.2, inplace=True)])
    attention = nn.MultiheadAttention(8, 2, dropout=0.2)

    def step(x, w):
        y = functional.pad(torch.sin(x * w).flatten(0, 1), (0, 1)).transpose(0, 1)
        for layer in layers:
            y = layer(y)
        return weighted(attention(y, y, y)[0])

    assert_as_in_eager(step)


@pytest.mark.slow
def test_a_checkpointed_part_draws_once():
    def part(y):
        torch.rand(3)
        return torch.sin(functional.dropout(torch.sin(y), 0.3))

    def step(x, w):
        return weighted(torch.utils.checkpoint.checkpoint(part, x * w, use_reentrant=False))

    assert_as_in_eager(step)


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin")  # of torch 2.11
@pytest.mark.parametrize(
    ("name", "draw"),
    [
        ("random numbers of NumPy", lambda x: torch.from_numpy(np.random.rand(7)).float()),
        ("a random generator that the step makes", lambda x: torch.rand(7, generator=torch.Generator())),
        ("skipped", lambda x: (torch.manual_seed(0), torch.rand(7))[1]),
        ("random_", lambda x: torch.empty(7).random_(10)),
    ],
)
def test_what_torch_cannot_draw_in_a_graph_is_refused(name, draw):
    def step(x, w):
        return (x * w * draw(x)).sum()

    with pytest.raises(lowtide.GraphBreak, match=f"test_random.py:.*{name}"):
        outcome(step, "100%")
