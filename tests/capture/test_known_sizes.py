"""Results as large as a mask of the batch says: captured with the size of each batch, and its bits."""

import copy

import pytest
import torch
from torch import nn

import lowtide
from lowtide.entry.in_place import capped_of
from small_models import gradients, same


class Selecting(nn.Module):
    """A layer between rows that a mask of the batch selects and a loss."""

    def __init__(self, way):
        super().__init__()
        self.way, self.layer = way, nn.Linear(8, 8)

    def forward(self, x, labels):
        return self.way(self.layer(x).tanh(), labels).square().mean()


WAYS = {
    "x[mask]": lambda y, labels: y[labels >= 0],
    "x[:, mask]": lambda y, labels: y.t()[:, labels >= 0],
    "masked_select": lambda y, labels: y.masked_select((labels >= 0)[:, None]) * 2,
    "nonzero": lambda y, labels: y[labels.ge(0).nonzero()[:, 0]],
    "where": lambda y, labels: y[torch.where(labels >= 0)[0]] + labels[labels >= 0][:, None],
}
OFTEN = ("x[mask]", "where")


def batches():
    return torch.tensor([1, -100, 2, 0, -100, 3]), torch.tensor([1, -100, 2, -100, -100, 3])


@pytest.mark.parametrize(
    "way",
    [pytest.param(way, marks=[pytest.mark.slow] * (name not in OFTEN)) for name, way in WAYS.items()],
    ids=WAYS,
)
def test_each_size_has_its_step(way):
    torch.manual_seed(0)
    plain, x = Selecting(way), torch.randn(6, 8)
    model = lowtide.cap(copy.deepcopy(plain), "1MiB", method="keep_all", prices="roofline")
    few, fewer = batches()
    for labels in (few, fewer, few.flip(0), fewer):
        for each in (plain, model):
            each.zero_grad()
            each(x, labels).backward()
        assert same(gradients(plain), gradients(model))
    assert len(capped_of(model).entries) == 2


def test_the_bytes_are_those_of_the_batch():
    found = lowtide.verify(Selecting(WAYS["x[mask]"]), torch.randn(6, 8), batches()[0], budget="min")
    assert found, str(found)
    assert found.predicted == found.measured


@pytest.mark.parametrize(
    "way",
    [
        lambda y, labels: y[y > 0],
        lambda y, labels: y[torch.randint(2, (6,)) > 0],
        lambda y, labels: y[labels.fill_(1) > 0],
    ],
    ids=["parameters", "draws", "what the step writes"],
)
def test_a_size_that_the_step_itself_decides_is_refused(way):
    model = lowtide.cap(Selecting(way), "1MiB")
    with pytest.raises(lowtide.GraphBreak, match="depends on the data"):
        model(torch.randn(6, 8), batches()[0])


def test_a_mask_of_another_length_is_the_users_error():
    model = lowtide.cap(Selecting(lambda y, labels: y[labels >= 0]), "1MiB")
    with pytest.raises(IndexError, match="mask"):
        model(torch.randn(6, 8), batches()[0][:5])
