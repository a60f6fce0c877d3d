"""Optimizers that step inside of the backward: the same bits as the plain loop, in the bytes of the plan."""

import copy
import gc
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

import lowtide
from lowtide.entry.in_place import capped_of
from lowtide.errors import LowtideError, UnsupportedBackward
from short_search import short_search
from small_models import TwoHeads, WithLoss, mlp

optim = torch.optim


@pytest.fixture(autouse=True)
def _less_search():
    with short_search():
        yield


class Lion(optim.Optimizer):
    """An optimizer of a user's own: one tensor after the other."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                moved = self.state[p].setdefault("moved", torch.zeros_like(p))
                p.add_((0.9 * moved + 0.1 * p.grad).sign(), alpha=-group["lr"])
                moved.lerp_(p.grad, 0.01)


class Tied(nn.Module):
    """The first and the last layer share their weight; one parameter is used in no step."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(24, 16)
        self.body = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
        self.head = nn.Linear(16, 24, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Parameter(torch.ones(5))

    def forward(self, x):
        h = self.embed(x)
        return nn.functional.cross_entropy(self.head(h + self.body(h)).flatten(0, 1), x.flatten())


class Gated(nn.Module):
    """The first layer's output multiplies what comes late in the backward."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(12, 12) for _ in range(3))

    def forward(self, x):
        early = torch.tanh(self.second(torch.tanh(self.third(x))))
        return (self.first(x).exp() * early * torch.tanh(self.first(early))).pow(2).mean()


def case(name):
    torch.manual_seed(3)
    if name == "tied":
        return Tied(), torch.randint(24, (4, 9))
    if name == "gated":
        return Gated(), torch.randn(40, 12)
    if name == "norms":
        layers = nn.BatchNorm1d(16), nn.Dropout(0.3), nn.ReLU()
        return WithLoss(nn.Sequential(nn.Linear(16, 16), *layers, nn.Linear(16, 1))), torch.randn(64, 16)
    return WithLoss(mlp(width=16, depth=4)), torch.randn(64, 16)


def train(model, optimizer, x, steps=3, scheduler=None):
    torch.manual_seed(7)
    for _ in range(steps):
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()


def left_by(model, optimizer):
    """What training leaves: everything that is saved in checkpoints."""
    return {**model.state_dict()}, optimizer.state_dict()


def same(left, right):
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


def both(make, x, model, budget="min", scheduler=None, **options):
    """Train a copy plainly and the model capped: the plan, and what each leaves."""
    plain = copy.deepcopy(model)
    optimizers = make(plain), make(model)
    lowtide.cap(model, budget, optimizer=optimizers[1], step_in_backward=True, **options)
    found = []
    for each, optimizer in zip((plain, model), optimizers, strict=True):
        train(each, optimizer, x, scheduler=scheduler and scheduler(optimizer))
        found.append(left_by(each, optimizer))
    return lowtide.plan_of(model), *found


def measured(model, x):
    """The peak of one more step, without what the training loop does after its backward."""
    optimizer = capped_of(model).options.optimizer
    state = [item for each in optimizer.state.values() for item in each.values()]
    held = [item for item in state if isinstance(item, torch.Tensor)]
    return lowtide.measure(lambda: model(x).backward(), device="cpu", resident=held).peak


OFTEN = ("SGD momentum", "AdamW foreach", "Lion")
OPTIMIZERS = {
    "SGD": lambda p: optim.SGD(p, lr=0.1),
    "SGD momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "SGD foreach": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, foreach=True, maximize=True),
    "SGD fused": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "Adam": lambda p: optim.Adam(p, amsgrad=True),
    "Adam foreach": lambda p: optim.Adam(p, foreach=True),
    "AdamW": lambda p: optim.AdamW(p, maximize=True),
    "AdamW foreach": lambda p: optim.AdamW(p, foreach=True, amsgrad=True),
    "AdamW fused": lambda p: optim.AdamW(p, fused=True),
    "Adafactor": lambda p: optim.Adafactor(p),
    "Adagrad": lambda p: optim.Adagrad(p),
    "Adadelta": lambda p: optim.Adadelta(p),
    "Adamax": lambda p: optim.Adamax(p),
    "ASGD": lambda p: optim.ASGD(p),
    "NAdam": lambda p: optim.NAdam(p, foreach=True),
    "RAdam": lambda p: optim.RAdam(p),
    "RMSprop": lambda p: optim.RMSprop(p, momentum=0.5, centered=True),
    "Rprop": lambda p: optim.Rprop(p),
    "Lion": lambda p: Lion(p),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in OFTEN)) for name in OPTIMIZERS]
)
def test_the_bits_and_the_bytes_of_every_optimizer(name):
    model, x = case("mlp")
    plan, plain, capped = both(lambda m: OPTIMIZERS[name](m.parameters()), x, model)
    assert same(plain, capped)
    assert plan.gradient_bytes == 0
    assert measured(model, x) == plan.peak


@pytest.mark.parametrize(
    "name", ["gated", *(pytest.param(each, marks=pytest.mark.slow) for each in ("tied", "norms"))]
)
@pytest.mark.parametrize("budget", ["min", pytest.param("100%", marks=pytest.mark.slow)])
def test_models_that_read_parameters_more_than_once(name, budget):
    model, x = case(name)
    plan, plain, capped = both(lambda m: optim.AdamW(m.parameters(), lr=0.01), x, model, budget)
    assert same(plain, capped)
    updates = [op for op in plan.graph.ops if op.updates]
    assert updates
    assert plan.gradient_bytes == 0
    assert all(plan.graph.value[name].kind == "parameter" for op in updates for name in op.updates)


@pytest.mark.slow
def test_measured_is_predicted_where_gradients_are_most_of_a_step():
    model, x = WithLoss(mlp(width=96, depth=6)), torch.randn(8, 96)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    gradients = sum(p.numel() * 4 for p in model.parameters())
    found = [
        lowtide.verify(model, x, budget="min", optimizer=optimizer, step_in_backward=inside)
        for inside in (False, True)
    ]
    assert all(found)
    assert all(each.measured == each.predicted for each in found)
    assert found[0].measured - found[1].measured > 0.5 * gradients
    assert set(found[1].compared) == {"outputs", "parameters", "random"}


def test_verify_leaves_the_optimizer_as_it_was():
    model, x = case("mlp")
    optimizer = optim.AdamW(model.parameters())
    train(model, optimizer, x)
    before = copy.deepcopy(left_by(model, optimizer))
    found = lowtide.verify(model, x, budget="90%", optimizer=optimizer, step_in_backward=True)
    assert found.ok
    assert found.measured == found.predicted
    assert found.compared["states"] == 3 * found.compared["parameters"]
    assert same(before, left_by(model, optimizer))


def test_groups_schedulers_and_hooks_are_as_in_the_plain_loop():
    model, x = case("mlp")

    def make(m):
        first, *others = m.net
        rest = [p for each in others for p in each.parameters()]
        groups = [{"params": first.parameters(), "lr": 0.5, "weight_decay": 0.3}, {"params": rest}]
        optimizer = optim.AdamW(groups, lr=0.01)
        optimizer.register_step_post_hook(lambda *_: calls.append(1))
        return optimizer

    calls = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, plain, capped = both(make, x, model, scheduler=partial(StepLR, step_size=1, gamma=0.5))
    assert same(plain, capped)
    assert len(calls) == 6


def test_two_optimizers_have_their_own_parameters():
    model, x = case("mlp")
    plain = copy.deepcopy(model)
    left = []
    for each in (plain, model):
        body, head = each.net[:-1], each.net[-1]
        optimizers = [optim.SGD(body.parameters(), lr=0.1, momentum=0.9), optim.AdamW(head.parameters())]
        if each is model:
            lowtide.cap(model, "min", optimizer=optimizers, step_in_backward=True)
        for _ in range(3):
            each(x).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        left.append([left_by(each, optimizer) for optimizer in optimizers])
    assert same(*left)


def test_a_parameter_with_hooks_and_one_that_no_optimizer_has_keep_their_gradients():
    model, x = case("mlp")
    plain = copy.deepcopy(model)
    seen, left = [], []
    for each in (plain, model):
        each.net[0].weight.register_hook(lambda grad: seen.append(grad.clone()))
        optimizer = optim.AdamW([p for name, p in each.named_parameters() if name != "net.2.weight"])
        if each is model:
            lowtide.cap(model, "min", optimizer=optimizer, step_in_backward=True)
        each(x).backward()
        if each is model:
            assert model.net[0].weight.grad is not None
            assert model.net[0].bias.grad is None
        optimizer.step()
        left.append((left_by(each, optimizer), each.net[2].weight.grad.clone()))
    assert same(*left)
    assert torch.equal(*seen)
    assert any("2 others are left to optimizer.step()" in note for note in lowtide.plan_of(model).notes)


@pytest.mark.slow
def test_parameters_that_share_memory_are_left_to_the_step():
    torch.manual_seed(0)
    whole = torch.randn(2, 16, 16)
    net = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
    net[0].weight, net[2].weight = nn.Parameter(whole[0]), nn.Parameter(whole[1])
    model, x = WithLoss(net), torch.randn(32, 16)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    lowtide.cap(model, "min", optimizer=optimizer, step_in_backward=True)
    model(x).backward()
    assert net[0].weight.grad is not None
    assert net[4].weight.grad is None


def test_a_closure_may_hold_the_whole_step():
    model, x = case("mlp")
    plain = copy.deepcopy(model)
    left = []
    for each in (plain, model):
        optimizer = optim.AdamW(each.parameters())
        if each is model:
            lowtide.cap(model, "min", optimizer=optimizer, step_in_backward=True)

        def closure(each=each, optimizer=optimizer):
            optimizer.zero_grad()
            loss = each(x)
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)
        left.append(left_by(each, optimizer))
    assert same(*left)


def test_checkpoints_go_from_one_to_the_other():
    model, x = case("mlp")
    optimizer = optim.AdamW(model.parameters())
    lowtide.cap(model, "min", optimizer=optimizer, step_in_backward=True)
    train(model, optimizer, x)
    other = WithLoss(mlp(width=16, depth=4))
    other_optimizer = optim.AdamW(other.parameters())
    other.load_state_dict(model.state_dict())
    other_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.load_state_dict(optimizer.state_dict())
    train(model, optimizer, x)
    train(other, other_optimizer, x)
    assert same(left_by(model, optimizer), left_by(other, other_optimizer))


def test_after_uncap_gradients_stay_again():
    model, x = case("mlp")
    optimizer = optim.AdamW(model.parameters())
    lowtide.cap(model, "min", optimizer=optimizer, step_in_backward=True)
    train(model, optimizer, x)
    lowtide.uncap(model)
    model(x).backward()
    model(x).backward()
    assert all(p.grad is not None for p in model.parameters())
    optimizer.step()


def capped(**more):
    model, x = case("mlp")
    optimizer = optim.AdamW(model.parameters())
    lowtide.cap(model, "100%", optimizer=optimizer, step_in_backward=True, **more)
    return model, optimizer, x


def test_accumulation_and_gradients_of_before_are_refused():
    model, x = case("mlp")
    optimizer = optim.AdamW(model.parameters())
    model(x).backward()
    lowtide.cap(model, "100%", optimizer=optimizer, step_in_backward=True)
    with pytest.raises(LowtideError, match="10 parameters have a gradient already"):
        model(x).backward()
    optimizer.zero_grad()
    model(x).backward()
    with pytest.raises(UnsupportedBackward, match=r"AdamW.step\(\) was not called since the first"):
        model(x).backward()
    optimizer.step()
    model(x).backward()


def test_hooks_and_changes_of_the_optimizer_that_come_later_are_refused():
    model, optimizer, x = capped()
    train(model, optimizer, x)
    before = [p.detach().clone() for p in model.parameters()]
    hook = model.net[0].weight.register_hook(lambda _: None)
    with pytest.raises(UnsupportedBackward, match=r"the parameter net\.0\.weight has got a hook since"):
        model(x).backward()
    hook.remove()
    hook = optimizer.register_step_pre_hook(lambda *_: None)
    with pytest.raises(UnsupportedBackward, match="a hook runs before its step"):
        model(x).backward()
    hook.remove()
    last = optimizer.param_groups[0]["params"].pop()
    with pytest.raises(UnsupportedBackward, match="no longer among the optimizer's parameters"):
        model(x).backward()
    optimizer.param_groups[0]["params"].append(last)
    assert same(before, list(model.parameters()))
    model(x).backward()


def test_a_scaled_loss_and_a_backward_for_some_inputs_are_refused():
    model, _, x = capped()
    before = [p.detach().clone() for p in model.parameters()]
    scaler, weight = torch.amp.GradScaler("cpu"), model.net[0].weight
    with pytest.raises(UnsupportedBackward, match=r"multiplied by 65536 .*GradScaler"):
        scaler.scale(model(x)).backward()
    with pytest.raises(UnsupportedBackward, match="for some inputs only"):
        torch.autograd.grad(model(x), [weight])
    with pytest.raises(UnsupportedBackward, match="for some inputs only"):
        model(x).backward(inputs=[weight])
    assert same(before, list(model.parameters()))


def test_a_second_call_before_the_backward_and_a_penalty_outside_of_the_step_are_refused():
    model, optimizer, x = capped()
    first = model(x)
    with pytest.raises(UnsupportedBackward, match="earlier training call is still to come"):
        model(x)
    del first
    gc.collect()
    train(model, optimizer, x)
    loss = model(x) + model.net[0].bias.sum()
    loss.backward()
    with pytest.raises(UnsupportedBackward, match=r"1 parameters of WithLoss .* another gradient since"):
        optimizer.step()


def test_another_graph_that_saved_a_parameter_sees_the_change():
    model, _, x = capped()
    other = (model.net[0].weight * model.net[0].weight).sum()
    model(x).backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()


@pytest.mark.parametrize(
    ("choices", "said"),
    [
        ({"executor": "inductor"}, 'cannot be used with executor="inductor"'),
        ({"allow_breaks": True}, "cannot be used with allow_breaks=True"),
        ({"optimizer": None}, "needs the optimizer that steps"),
        ({"step_in_backward": 1}, "must be True or False"),
    ],
)
def test_what_cannot_go_together(choices, said):
    model, _ = case("mlp")
    given = {"optimizer": optim.SGD(model.parameters()), "step_in_backward": True, **choices}
    with pytest.raises(LowtideError, match=said):
        lowtide.cap(model, "min", **given)
    assert capped_of(model) is None


def test_an_optimizer_of_another_model_is_refused():
    model, x = case("mlp")
    other, _ = case("mlp")
    lowtide.cap(model, "100%", optimizer=optim.SGD(other.parameters()), step_in_backward=True)
    with pytest.raises(LowtideError, match="has nothing to update"):
        model(x)


def test_the_backend_of_torch_compile_refuses():
    model, x = case("mlp")
    given = {"budget": "min", "optimizer": optim.SGD(model.parameters()), "step_in_backward": True}
    step = torch.compile(model, backend="lowtide", options=given)
    with pytest.raises(Exception, match=r"is an option of lowtide\.cap"):
        step(x)


@pytest.mark.slow
def test_plans_count_on_it_and_say_so():
    model, x = WithLoss(mlp(width=16, depth=4)), torch.randn(4, 16)
    optimizer = optim.AdamW(model.parameters(), fused=True)
    plans = [
        lowtide.plan(model, x, budget="min", optimizer=optimizer, step_in_backward=inside)
        for inside in (False, True)
    ]
    assert plans[1].peak < plans[0].peak
    assert any("updated inside of the backward" in note for note in plans[1].notes)
    assert lowtide.Plan.from_json(plans[1].to_json()) == plans[1]
    with torch.device("meta"):
        absent = WithLoss(mlp(width=16, depth=4))
    given = {"optimizer": optim.AdamW(absent.parameters(), fused=True), "step_in_backward": True}
    assert lowtide.plan(absent, x.to("meta"), budget="min", **given).peak == plans[1].peak


def test_outputs_without_a_gradient_update_nothing():
    torch.manual_seed(0)
    model, x = TwoHeads(), torch.randn(6, 8)
    plain = copy.deepcopy(model)
    left = []
    for each in (plain, model):
        optimizer = optim.AdamW(each.parameters(), weight_decay=0.1)
        if each is model:
            lowtide.cap(model, "100%", optimizer=optimizer, step_in_backward=True)
        for head in (0, 1, 0):
            each(x)[head].pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        left.append(left_by(each, optimizer))
    assert same(*left)
