"""Cells of all kinds, and the tensors that they read without being given them."""

import functools
import types

import pytest
import torch
from torch import nn

from lowtide import LowtideError
from lowtide.sequences import scan
from plain_loop import Product, Squash, check, plain, same, step, weighed

F64 = torch.float64
WEIGHT_OF_ALL = torch.linspace(-1, 1, 16, dtype=F64).view(4, 4).requires_grad_()


class Callable:
    def __init__(self, weight):
        self.weight = weight

    def __call__(self, h, x):
        return torch.tanh(h @ self.weight + x), h.sum()

    def method(self, h, x):
        return self(h, x)


def of_globals(h, x):
    return torch.tanh(h @ WEIGHT_OF_ALL + x), h.sum()


CELLS = {
    "closure": step,
    "object": Callable,
    "method": lambda weight: Callable(weight).method,
    "partial": lambda weight: functools.partial(lambda h, x, w: (torch.tanh(h @ w + x), h.sum()), w=weight),
    "default": lambda weight: lambda h, x, w=weight: (torch.tanh(h @ w + x), h.sum()),
    "custom function": lambda weight: lambda h, x: (torch.tanh(Product.apply(h, weight) + x), h.sum()),
    "nested list": lambda weight: lambda h, x, held=[[weight]]: (torch.tanh(h @ held[0][0] + x), h.sum()),
    "hidden in a namespace": lambda weight: _in_namespace(types.SimpleNamespace(weight=weight)),
    "compiled": lambda weight: torch.compile(step(weight), backend="eager"),
}


def _in_namespace(space):
    return lambda h, x: (torch.tanh(h @ space.weight + x), h.sum())


@pytest.mark.parametrize("name", CELLS)
def test_all_kinds_of_cells(name, weight, xs, start):
    check(lambda: CELLS[name](weight), start, xs, [weight])


def test_cells_that_read_globals(xs, start):
    check(lambda: of_globals, start, xs, [WEIGHT_OF_ALL])


@pytest.mark.parametrize(
    "wrap", [lambda cell: cell, torch.jit.script, functools.partial(torch.compile, backend="eager")]
)
def test_modules(wrap, xs, start):
    module = wrap(Squash())
    check(lambda: module, start, xs, list(module.parameters()))


def test_unused_and_frozen_parameters_get_no_gradient(xs, start):
    module = Squash()
    module.unused, module.frozen = (
        nn.Parameter(torch.ones(3)),
        nn.Parameter(torch.ones(3), requires_grad=False),
    )
    module.linear.bias.requires_grad_(False)
    weighed(scan(module, start, xs, slots=3)).backward()
    assert module.linear.weight.grad is not None
    assert module.unused.grad is module.frozen.grad is module.linear.bias.grad is None


def test_tied_parameters(xs, start):
    module = Squash()
    module.other = nn.Linear(4, 4, bias=False, dtype=F64)
    module.other.weight = module.linear.weight
    cell = lambda h, x: (torch.tanh(module.linear(h) + module.other(x)), h.sum())  # noqa: E731
    check(lambda: cell, start, xs, list(module.parameters()))


@pytest.mark.slow
@pytest.mark.parametrize("wrap", ["eager", "compiled"])
def test_results_of_other_computations_are_supported(wrap, weight, xs, start):
    def make():
        doubled = weight * 2

        def cell(h, x):
            return torch.tanh(h @ doubled + x @ weight), h.sum()

        return cell if wrap == "eager" else torch.compile(cell, backend="eager")

    check(make, start, xs, [weight])


@pytest.mark.parametrize("place", ["xs", "init", "functional_call", "view"])
def test_results_that_come_by_other_ways(place, weight, xs, start):
    xs.requires_grad_()
    module, found = Squash(), []
    for run in (plain, functools.partial(scan, slots=3)):
        inputs, begin, line = xs * 2, start + xs[0], weight.view(16)
        mine = {name: parameter * 1.5 for name, parameter in module.named_parameters()}
        cell = {
            "xs": lambda h, x, all_of_it=inputs: (torch.tanh(h @ weight + x + all_of_it.sum(0)), h.sum()),
            "init": lambda h, x, begin=begin: (torch.tanh(h @ weight + x + begin), h.sum()),
            "functional_call": lambda h, x, mine=mine: torch.func.functional_call(module, mine, (h, x)),
            "view": lambda h, x, line=line: (torch.tanh(h @ line.view(4, 4) + x), h.sum()),
        }[place]
        loss = weighed(run(cell, begin, inputs))
        found.append(torch.autograd.grad(loss, [weight, xs, *module.parameters()], allow_unused=True))
    assert same(found[1], found[0], 1e-12)


def test_a_result_of_another_computation_keeps_its_hooks_and_gradient(weight, xs, start):
    found = []
    for run in (plain, functools.partial(scan, slots=3)):
        doubled, seen = weight * 2, []
        doubled.retain_grad()
        doubled.register_hook(seen.append)
        weighed(run(step(doubled), start, xs)).backward()
        assert len(seen) == 1
        found.append(doubled.grad)
    assert same(found[0], found[1], 1e-12)


def test_a_result_that_a_custom_function_reads_is_refused(weight, xs, start):
    doubled = weight * 2
    with pytest.raises(LowtideError, match="result of another computation"):
        scan(lambda h, x: (torch.tanh(Product.apply(h, doubled) + x), None), start, xs, slots=3)


def late(h_and_n, x, space):
    h, n = h_and_n
    weight = space.late if n in space.when else space.weight
    return (torch.tanh(h @ weight + x), n + 1), h.sum()


@pytest.mark.parametrize("when", [range(5, 9), range(5, 7)], ids=["from step 5 on", "in steps 5 and 6"])
def test_a_parameter_that_is_read_late_is_refused_or_supported(when, weight, xs, start):
    space = types.SimpleNamespace(weight=weight, late=weight.detach().clone().requires_grad_(), when=when)
    cell = lambda carry, x: late(carry, x, HOLDER[0])  # noqa: E731
    HOLDER[:] = [space]
    with pytest.raises(LowtideError, match="parameters="):
        weighed(scan(cell, (start, 0), xs, slots=3)).backward()
    assert weight.grad is space.late.grad is None
    check(
        lambda: cell,
        (start, 0),
        xs,
        [weight, space.late],
        scanned={"slots": 3, "parameters": [weight, space.late]},
    )


HOLDER = []


def test_a_compiled_model_breaks_its_graph_at_a_scan(weight, xs, start):
    def loss():
        return scan(step(weight), start, xs, slots=3, reduce="sum")[1] * 2

    compiled = torch.compile(lambda x: loss() + x.sum(), backend="eager")
    (mine,) = torch.autograd.grad(compiled(xs), weight)
    (true,) = torch.autograd.grad(loss(), weight)
    assert torch.equal(mine, true)
    torch._dynamo.reset()
