"""DistributedDataParallel around a capped module, by one process: what it waits for, and what it holds.

Several ranks are in `test_ranks.py`.
"""

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import lowtide
from ddp_loops import Net, batches, events_of_backward, train
from small_models import TwoHeads, same

pytestmark = pytest.mark.usefixtures("process_group")

OPTIONS = {
    "plain": {},
    "bucket views": {"gradient_as_bucket_view": True},
    "static graph": {"static_graph": True},
    "unused parameters": {"find_unused_parameters": True},
    "views, static": {"gradient_as_bucket_view": True, "static_graph": True},
}


def both(budget, *, steps=4, rows=256, **loop):
    found = []
    for each in (None, budget):
        torch.manual_seed(0)
        model = Net(layers=5)
        found.append((*train(model, batches(steps, rows=rows), budget=each, **loop), model))
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:find_unused_parameters")
@pytest.mark.parametrize("budget", ["100%", "min"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_weights_and_peak_of_a_loop(options, budget):
    (weights, _, _), (capped, peaks, model) = both(budget, **options)
    plan = lowtide.plan_of(model)
    assert same(capped, weights)
    assert peaks[-1] <= plan.peak
    if len(options) < 2:  # of a static graph's first step a plan with views must be, in which they stay
        assert peaks[-1] >= plan.peak - 8 * len(weights)  # two numbers that DDP may touch or not
    assert plan.graph.fixed["DDP buckets"] == sum(p.nbytes + 8 for p in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("zero", [True, False])
@pytest.mark.parametrize("views", [False, True])
def test_weights_and_peak_under_no_sync(views, zero):
    loop = {"accumulate": 2, "steps": 6, "zero": zero, "gradient_as_bucket_view": views}
    (weights, _, _), (capped, peaks, model) = both("min", **loop)
    assert same(capped, weights)
    assert peaks[-1] <= lowtide.plan_of(model).peak


@pytest.mark.slow
def test_views_into_buckets_save_a_set_of_gradients():
    (_, peaks, model), (_, with_views, _) = (
        both("min", rows=8, gradient_as_bucket_view=views)[1] for views in (False, True)
    )
    gradients = sum(p.nbytes for p in model.parameters())
    assert with_views[-1] < peaks[-1] - gradients / 2


@pytest.mark.slow
@pytest.mark.parametrize("budget", ["100%", "min"])
def test_all_reduce_overlaps_the_backward(budget):
    plain, capped = events_of_backward(None), events_of_backward(budget)
    firsts = [each.index("bucket") for each in (plain, capped)]
    assert firsts[1] <= firsts[0] + 1  # in layers
    assert capped.count("bucket") >= plain.count("bucket") >= 4
    after = [event for event in capped[firsts[1] :] if event != "bucket"]
    assert len(after) >= 5


@pytest.mark.slow
def test_gradients_reach_hooks_after_the_last_read_of_their_parameter():
    """An optimizer that steps inside the backward changes parameters that recomputation may need."""

    def loop(budget):
        torch.manual_seed(0)
        model = Net()
        adam = {p: torch.optim.AdamW([p], lr=0.1) for p in model.parameters()}

        def step(parameter):
            adam[parameter].step()
            adam[parameter].zero_grad()

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        if budget is not None:
            lowtide.cap(model, budget)
        for x, target in batches(3):
            model(x, target).backward()
        return [p.detach() for p in model.parameters()]

    assert same(loop("min"), loop(None))


@pytest.mark.slow
def test_gradients_of_some_inputs_alone():
    """Autograd leaves out the gates of the others; the backward runs past them."""
    torch.manual_seed(0)
    model = Net()
    x, target = next(batches(1))
    wanted = [model.layers[3].weight, model.layers[6].bias]
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: None)
    plain = torch.autograd.grad(seeded(model, x, target), wanted)
    lowtide.cap(model, "min")
    assert same(torch.autograd.grad(seeded(model, x, target), wanted), plain)
    assert all(parameter.grad is None for parameter in model.parameters())


def seeded(model, *args):
    torch.manual_seed(1)
    return model(*args)


@pytest.mark.parametrize("views", [False, True])
def test_a_gradient_that_does_not_come(views):
    """One of two outputs is in the loss: the head of the other gets none, and DDP is told."""

    def weights(budget):
        torch.manual_seed(0)
        model = TwoHeads()
        if budget:
            lowtide.cap(model, budget)
        outer = DistributedDataParallel(model, find_unused_parameters=True, gradient_as_bucket_view=views)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            outer(torch.ones(5, 8))[0].square().mean().backward()
            sgd.step()
            sgd.zero_grad()
        return [p.detach() for p in model.parameters()]

    assert same(weights("100%"), weights(None))


def test_a_step_whose_input_needs_a_gradient():
    """What comes before the capped part gets its gradient when the backward is over."""
    torch.manual_seed(0)
    x = torch.randn(16, 64, requires_grad=True)
    target = torch.randint(10, (16,))
    model = Net()
    outer = DistributedDataParallel(model)
    seeded(outer, x * 2, target).backward()
    plain, x.grad = x.grad, None
    outer.zero_grad()
    lowtide.cap(outer, "100%")
    seeded(outer, x * 2, target).backward()
    assert torch.equal(x.grad, plain)
