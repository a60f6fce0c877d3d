"""Which optimizers may step on one parameter after the other: found out by trying, refused by name."""

import pytest
import torch
from torch import nn

from lowtide.devices.per_tensor import innermost, refuse_joint_updates, step_on
from lowtide.errors import LowtideError

optim = torch.optim


def parameters():
    return [nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(5))]


class Clipping(optim.SGD):
    def step(self, closure=None):
        own = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        nn.utils.clip_grad_norm_(own, 1.0) if own else None
        return super().step(closure)


class Counting(optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            group["calls"] = group.get("calls", 0) + 1
        return super().step(closure)


class Noisy(optim.SGD):
    def step(self, closure=None):
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            p.grad.add_(torch.randn_like(p))
        return super().step(closure)


class Careless(optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for p in (p for group in self.param_groups for p in group["params"]):
            p.sub_(p.grad)


class Wrapper:
    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.param_groups, self.state = optimizer.param_groups, {}

    def step(self):
        self.optimizer.step()


def replaced(optimizer):
    optimizer.step = lambda: None
    return optimizer


def hooked(optimizer):
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


def test_those_of_torch_may():
    for kind in (
        optim.SGD,
        optim.Adam,
        optim.AdamW,
        optim.Adafactor,
        optim.RMSprop,
        optim.NAdam,
        optim.RAdam,
    ):
        refuse_joint_updates(kind(parameters(), lr=0.1))
    for form in ("foreach", "fused"):
        refuse_joint_updates(optim.AdamW(parameters(), lr=0.1, **{form: True}))
    refuse_joint_updates(optim.AdamW(parameters(), lr=torch.tensor(0.1)))
    scheduled = optim.AdamW(parameters())
    optim.lr_scheduler.StepLR(scheduled, 1)
    refuse_joint_updates([scheduled, optim.SGD(parameters(), lr=0.1)])


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda p: optim.LBFGS(p), "LBFGS: its step.. needs a closure"),
        (lambda p: optim.SparseAdam(p), "SparseAdam: .* failed"),
        (lambda p: optim.Adam(p, differentiable=True), "Adam: with differentiable=True"),
        (lambda p: Clipping(p, lr=0.1), "Clipping: its update of a tensor depends on the others"),
        (lambda p: Counting(p, lr=0.1), "Counting: .* or it counts its calls"),
        (lambda p: Noisy(p, lr=0.1), "Noisy: its step draws random numbers"),
        (lambda p: Careless(p, lr=0.1), "Careless: its step on one parameter alone was tried and failed"),
        (lambda p: replaced(optim.SGD(p)), "SGD: something else stands in the place of its step"),
        (lambda p: hooked(optim.SGD(p)), "SGD: a hook runs before its step"),
        (lambda p: Wrapper(optim.SGD(p)), "Wrapper: it wraps another optimizer"),
    ],
)
def test_others_are_refused_by_name(make, said):
    with pytest.raises(LowtideError, match=f"cannot be used with {said}"):
        refuse_joint_updates(make(parameters()))


def test_two_that_share_a_parameter_are_refused():
    shared = parameters()
    with pytest.raises(LowtideError, match="a parameter of it is in SGD, too"):
        refuse_joint_updates([optim.SGD(shared), optim.AdamW(shared)])


def test_trying_leaves_the_optimizer_and_the_random_state_alone():
    optimizer = optim.AdamW(parameters())
    random, groups = torch.get_rng_state(), optimizer.param_groups
    refuse_joint_updates(optimizer)
    assert torch.equal(random, torch.get_rng_state())
    assert optimizer.param_groups is groups
    assert not optimizer.state


def test_a_step_on_some_parameters_leaves_the_groups_as_they_were_even_if_it_fails():
    optimizer = Careless(parameters(), lr=0.1)
    (group,) = optimizer.param_groups
    whole = group["params"]
    whole[1].grad = torch.ones(5)
    before = [p.detach().clone() for p in whole]
    step_on(optimizer, [(group, [whole[1]])])
    assert torch.equal(whole[0], before[0])
    assert not torch.equal(whole[1], before[1])
    with pytest.raises(TypeError):
        step_on(optimizer, [(group, [whole[0]])])
    assert optimizer.param_groups == [group]
    assert group["params"] is whole


def test_wrappers_of_accelerate_are_looked_through():
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed (the extra tools)")
    inside = optim.AdamW(parameters())
    wrapped = accelerate.Accelerator(cpu=True).prepare_optimizer(inside)
    assert innermost(wrapped) is inside
    refuse_joint_updates(wrapped)
    wrapped.scaler = object()
    with pytest.raises(LowtideError, match="GradScaler"):
        refuse_joint_updates(wrapped)
