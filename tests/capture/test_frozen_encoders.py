"""Attention of torch's own in eval mode inside of a step that trains: its fast kernels, or a refusal."""

import pytest
import torch
from torch import nn

import lowtide
from lowtide import _torch
from lowtide.entry.in_place import capped_of

WIDTH = 8


class Features(nn.Module):
    """A head on the features of a part that stays in eval mode, with the places of padding among them."""

    def __init__(self, part):
        super().__init__()
        self.part, self.head = part, nn.Linear(WIDTH, 4)

    def train(self, mode=True):
        super().train(mode)
        self.part.eval()
        return self

    def forward(self, x, padded):
        with torch.no_grad():
            if isinstance(self.part, nn.MultiheadAttention):
                features, _ = self.part(x, x, x, key_padding_mask=padded)
            else:
                features = self.part(x, src_key_padding_mask=padded)
        return self.head(features).square().mean()


def encoder(**options):
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True), 2, **options)


def batch(*, at_the_end=True):
    padded = torch.zeros(3, 5, dtype=torch.bool)
    padded[1, 3:] = True
    return torch.randn(3, 5, WIDTH), padded if at_the_end else padded.flip(1)


@pytest.mark.parametrize(
    ("make", "at_the_end"),
    [
        (lambda: nn.MultiheadAttention(WIDTH, 2, batch_first=True), True),
        pytest.param(lambda: encoder(enable_nested_tensor=False), True, marks=pytest.mark.slow),
        pytest.param(encoder, False, marks=pytest.mark.slow),
    ],
    ids=["attention", "not nested", "padded in front"],
)
def test_the_kernels_are_those_of_plain_pytorch(make, at_the_end):
    torch.manual_seed(0)
    found = lowtide.verify(Features(make()).train(), *batch(at_the_end=at_the_end), budget="min")
    assert found, str(found)
    assert found.predicted == found.measured


@pytest.mark.slow
def test_torchs_tables_are_as_they_were_and_no_call_is_captured_again():
    model = nn.Sequential(
        nn.MultiheadAttention(WIDTH, 2, batch_first=True), encoder(enable_nested_tensor=False)
    )
    steps = [lowtide.cap(Features(part).train(), "1MiB", prices="roofline") for part in model]
    for step in steps * 3:
        step(*batch()).backward()
    for step in steps:
        (entry,) = capped_of(step).entries.values()
        assert len(entry.parts) == 1
    assert _torch.private("tracing_states")()[nn.modules.activation._is_make_fx_tracing] is True


@pytest.mark.parametrize("frozen", [False, True])
def test_what_runs_on_nested_tensors_is_refused_with_a_way_out(frozen):
    model = Features(encoder().requires_grad_(not frozen)).train()
    with pytest.raises(lowtide.GraphBreak, match=r"nested tensors.*enable_nested_tensor=False"):
        lowtide.cap(model, "1MiB")(*batch())
    assert nn.TransformerEncoder.forward.__module__.startswith("torch.")
