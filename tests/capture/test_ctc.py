"""The CTC loss inside of a step: the bits of plain PyTorch, and a plan for each longest label."""

import copy

import pytest
import torch
from torch import nn

import lowtide
from lowtide.entry.in_place import capped_of
from small_models import gradients, same


class Speech(nn.Module):
    """Frames, and a loss on labels of several lengths."""

    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(6, 16), nn.Linear(16, 8)
        self.loss = nn.CTCLoss(**options)

    def forward(self, x, labels, frames, lengths):
        scores = self.head(self.body(x).tanh()).log_softmax(-1).transpose(0, 1)
        with torch.backends.cudnn.flags(enabled=False):  # as transformers has it, for a GPU
            return self.loss(scores, labels, frames, lengths).sum()


FRAMES = torch.tensor([12, 7, 3])
LENGTHS = torch.tensor([4, 2, 3])
LABELS = torch.tensor([[1, 2, 2, 5], [3, 1, 0, 0], [4, 4, 4, 0]])
"""The last of them has no alignment with three frames: its loss is infinite."""


@pytest.mark.parametrize(
    ("options", "labels", "frames", "lengths"),
    [
        ({"zero_infinity": True}, LABELS, FRAMES, LENGTHS),
        pytest.param(
            *({"reduction": "sum"}, torch.cat([LABELS[0], LABELS[1, :2]]), FRAMES.tolist(), [4, 2, 0]),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *({"reduction": "none", "blank": 7}, LABELS, FRAMES, torch.tensor([4, 2, 1])),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["mean", "sum, one after the other, lengths in Python", "none, another blank"],
)
def test_loss_and_gradients_are_those_of_plain_pytorch(options, labels, frames, lengths):
    found = lowtide.verify(Speech(**options), torch.randn(3, 12, 6), labels, frames, lengths, budget="min")
    assert found, str(found)
    assert found.predicted == found.measured


@pytest.mark.slow
def test_each_longest_label_has_its_step():
    plain, x = Speech(zero_infinity=True), torch.randn(3, 12, 6)
    model = lowtide.cap(copy.deepcopy(plain), "1MiB", method="keep_all", prices="roofline")
    for lengths in (LENGTHS, LENGTHS - 1, LENGTHS.flip(0), LENGTHS.clamp_max(3)):
        for each in (plain, model):
            each.zero_grad()
            each(x, LABELS, FRAMES, lengths).backward()
        assert same(gradients(plain), gradients(model))
    assert len(capped_of(model).entries) == 2


def test_lengths_that_the_step_computes_itself_are_refused():
    class Own(Speech):
        def forward(self, x, labels, frames, lengths):
            return super().forward(x, labels, frames, (self.body.weight.sum(0)[:3] > 0).long())

    with pytest.raises(lowtide.GraphBreak, match="Dynamic shape operator"):
        lowtide.cap(Own(), "1MiB")(torch.randn(3, 12, 6), LABELS, FRAMES, LENGTHS)
