"""Steps that ask for gradients themselves: penalties, forces, inner updates. Captured, or refused by name."""

import pytest
import torch
from torch import nn

import lowtide
from lowtide._torch import leaves_may_be_inside

WIDTH = 8


class Critic(nn.Module):
    """A network that is judged by its gradient as well, in a way that is handed in."""

    def __init__(self, judged):
        super().__init__()
        self.judged, self.weight = judged, nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.net = nn.Sequential(
            nn.Linear(WIDTH, 16), nn.GroupNorm(4, 16), nn.SiLU(), nn.Dropout(0.2), nn.Linear(16, 1)
        )

    def forward(self, x):
        return self.judged(self, x)


def penalty(model, x):
    """WGAN-GP: the norm of the gradient at a point of the step's own should be one."""
    x = (x + torch.rand(len(x), 1)).requires_grad_()
    y = model.net(x)
    (g,) = torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)
    return y.mean() + (g.norm(dim=1) - 1).square().mean()


def force(model, x):
    """A force field: the gradient at an input is what is compared."""
    x = x.detach().requires_grad_(True)
    return (torch.autograd.grad(model.net(x).sum(), x, create_graph=True)[0] - 1).square().mean()


def inner_update(model, x):
    """MAML: a step with updated weights."""
    inner = (x @ model.weight).tanh().square().mean()
    (g,) = torch.autograd.grad(inner, model.weight, create_graph=True)
    return (x @ (model.weight - 0.1 * g)).square().mean()


def saliency(model, x):
    """The gradient weighs the result, and has none itself."""
    x = x.detach().requires_grad_()
    y = model.net(x)
    (g,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    return (y * g.abs().mean()).square().mean()


@pytest.mark.slow
@pytest.mark.parametrize("judged", [penalty, force, inner_update, saliency])
def test_gradients_of_gradients_have_the_bits_of_plain_pytorch(judged):
    torch.manual_seed(0)
    model, x = Critic(judged), torch.randn(16, WIDTH)
    if judged is not inner_update and not leaves_may_be_inside():  # torch 2.11
        with pytest.raises(lowtide.GraphBreak, match=r"requires_grad_\(\).*as in gradient penalties"):
            lowtide.verify(model, x, budget="min")
        return
    found = lowtide.verify(model, x, budget="min")
    assert found, str(found)
    assert found.predicted == found.measured
    assert found.plan.peak < found.uncapped.peak


def backward_inside(model, x):
    loss = model.net(x).square().mean()
    loss.backward(retain_graph=True)
    return loss


def inputs_own(model, x):
    return penalty(model, x) + model.net(x.requires_grad_()).sum()


def leaf_returned(model, x):
    x = x.detach().requires_grad_()
    return model.net(x).sum(), x


@pytest.mark.parametrize(
    ("judged", "said"),
    [
        (backward_inside, "a backward inside of the step: return the loss"),
        (inputs_own, r"requires_grad_\(\) on an input of the step, .*(x = x\.detach\(\)|2\.13 captures)"),
        (leaf_returned, r"requires_grad_\(\) on (an input of the step, or on )?a tensor that the step makes"),
    ],
)
def test_what_changes_gradients_outside_is_refused_by_name(judged, said):
    model, x = lowtide.cap(Critic(judged), "1MiB"), torch.randn(16, WIDTH)
    with pytest.raises(lowtide.GraphBreak, match=said):
        model(x)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not x.requires_grad
