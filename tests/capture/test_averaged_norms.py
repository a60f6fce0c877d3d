"""BatchNorm with `momentum=None`: averages of all batches as statistics, with plain PyTorch's bits."""

import copy

import pytest
import torch
from torch import nn

import lowtide
from small_models import WithLoss, gradients, same


class Averaging(nn.Module):
    """Layers of all kinds, one of them called twice, with a loss."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(
            *(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, momentum=None), nn.ReLU()),
            *(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8, momentum=None, affine=False), nn.ReLU()),
            *(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 16, 8)),
        )
        self.twice = nn.BatchNorm1d(8, momentum=None)

    def forward(self, x):
        return self.twice(self.twice(self.body(x)).tanh()).square().mean(0).max()


def loop(model, batches, *, autocast=False):
    """Losses, gradients and buffers of a few steps; the last batch is of another size."""
    found = []
    for x in batches:
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(x)
        loss.backward()
        found += [loss.detach(), *gradients(model), *(buffer.clone() for buffer in model.buffers())]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["single", "double", "autocast"])
def test_averages_and_gradients_are_those_of_plain_pytorch(kind):
    dtype = torch.double if kind == "double" else torch.float
    batches = [torch.randn(rows, 3, 10, 10, dtype=dtype) for rows in (5, 5, 5, 3)]
    plain = Averaging().to(dtype)
    model = lowtide.cap(copy.deepcopy(plain), "min", prices="roofline")
    steps = [loop(each, batches, autocast=kind == "autocast") for each in (plain, model)]
    assert same(*steps)
    assert all(
        count == 4 for name, count in model.state_dict().items() if name == "body.1.num_batches_tracked"
    )


@pytest.mark.slow
def test_the_smallest_cap_holds_and_layers_that_recompute_count_once():
    found = lowtide.verify(Averaging(), torch.randn(6, 3, 10, 10), budget="min")
    assert found, str(found)
    assert found.predicted == found.measured


@pytest.mark.inductor
def test_compiled_steps_average_too():
    torch.manual_seed(0)
    layers = nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=None), nn.Linear(8, 1), nn.Flatten(0)
    plain, batches = WithLoss(nn.Sequential(*layers)), [torch.randn(4, 8) for _ in range(2)]
    model = lowtide.cap(copy.deepcopy(plain), "100%", executor="inductor")
    for expected, found in zip(loop(plain, batches), loop(model, batches), strict=True):
        torch.testing.assert_close(found, expected)


def test_a_batch_of_one_number_per_channel_is_the_users_error():
    model = lowtide.cap(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None)), "1MiB")
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        model(torch.ones(1, 4))


def test_torch_is_as_it_was():
    forward = nn.modules.batchnorm._BatchNorm.forward
    lowtide.plan(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None)), torch.ones(3, 4))
    assert nn.modules.batchnorm._BatchNorm.forward is forward
