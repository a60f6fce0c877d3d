"""`split=`: a step under a cap with its head, loss and MLP in chunks of rows, through the public names."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional

import lowtide
from lowtide.capture.deferred_output import Deferred
from lowtide.errors import BudgetTooSmall, LowtideError, PlanMismatch
from lowtide.options import Options
from short_search import short_search

VOCABULARY, WIDTH = 400, 16


class Text(nn.Module):
    """A language model without attention: an MLP, a head and its loss; logits too, where asked for."""

    def __init__(self, *, logits=False):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.logits = logits

    def forward(self, x, y):
        h = self.embed(x)
        h = h + self.down(functional.gelu(self.up(self.norm(h))))
        logits = self.head(h)
        loss = functional.cross_entropy(logits.view(-1, VOCABULARY).float(), y.view(-1))
        return (loss, logits) if self.logits else loss


@pytest.fixture(autouse=True)
def _short():
    with short_search():
        yield


def text(dtype=torch.float32, **options):
    torch.manual_seed(0)
    model = Text(**options).to(dtype)
    x = torch.randint(VOCABULARY, (3, 347))
    y = x.roll(-1, 1)
    y[0] = -100  # whole chunks without a loss
    return model, x, y


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_step_fits_where_it_did_not(dtype):
    model, x, y = text(dtype)
    without = lowtide.plan(model, x, y, budget="min").peak
    found = lowtide.verify(model, x, y, budget=without // 3, split=True, prices="roofline")
    assert found.ok
    assert found.verdict == "to rounding"
    assert found.exact
    assert found.measured == found.predicted <= without // 3
    assert found.plan.split
    assert found.rounding.capped <= 1.5 * found.rounding.plain
    assert "against fp64" in str(found)
    # what is computed for each row has the bits that it had
    assert not any("embed" in name or "norm" in name for name in found.different)


@pytest.mark.slow
def test_logits_that_are_returned_are_the_same_and_are_counted():
    model, x, y = text(logits=True)
    found = lowtide.verify(model, x, y, budget="min", split=4, prices="roofline")
    assert found.ok
    assert found.measured == found.predicted
    assert found.plan.split
    assert "outputs 1" not in found.far


@pytest.mark.slow
def test_a_budget_alone_splits_nothing():
    model, x, y = text()
    assert not lowtide.plan(model, x, y, budget="min").split
    plan = lowtide.plan(model, x, y, budget="100%", split=True)
    assert not plan.split  # nothing need be recomputed
    assert any("nothing is split" in note for note in plan.notes)


@pytest.mark.slow
def test_a_share_is_of_the_step_as_it_is():
    model, x, y = text()
    whole = lowtide.plan(model, x, y).peak
    assert lowtide.plan(model, x, y, budget="40%", split=True).budget == whole * 40 // 100


@pytest.mark.slow
def test_the_error_tells_what_it_would_make_possible():
    model, x, y = text()
    with pytest.raises(BudgetTooSmall, match=r"With split=True.* fits") as refused:
        lowtide.plan(model, x, y, budget=2**21)
    assert refused.value.smallest > 2**21
    assert lowtide.plan(model, x, y, budget=2**21, split=True).peak <= 2**21


@pytest.mark.slow
def test_a_plan_brings_its_chunks_along(tmp_path):
    model, x, y = text()
    plan = lowtide.plan(model, x, y, budget="30%", split=True, prices="roofline")
    again = lowtide.Plan.load(plan.save(tmp_path / "plan.json"))
    assert again.split == plan.split != ()
    twin = copy.deepcopy(model)
    lowtide.cap(twin, plan=again, prices="roofline")
    twin(x, y).backward()
    assert lowtide.plan_of(twin).split == plan.split
    model(x, y).backward()
    torch.testing.assert_close(twin.head.weight.grad, model.head.weight.grad)
    other = lowtide.cap(nn.Linear(4, 4), plan=again)
    with pytest.raises(PlanMismatch):
        other(torch.ones(2, 4))


@pytest.mark.slow
def test_gradients_are_added_to_those_that_are_there():
    model, x, y = text()
    twin = copy.deepcopy(model)
    lowtide.cap(twin, "40%", split=True, prices="roofline")
    for _ in range(3):
        model(x, y).backward()
        twin(x, y).backward()
    assert lowtide.plan_of(twin).split
    for left, right in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(left.grad, right.grad)


@pytest.mark.slow
def test_a_frozen_head_has_no_gradient_to_sum():
    model, x, y = text()
    model.head.requires_grad_(False)
    found = lowtide.verify(model, x, y, budget="25%", split=True, prices="roofline")
    assert found.ok
    assert found.plan.split


@pytest.mark.slow
def test_under_autocast():
    model, x, y = text()
    with torch.autocast("cpu", torch.bfloat16):
        found = lowtide.verify(model, x, y, budget="25%", split=True, prices="roofline")
    assert found.ok
    assert found.plan.split


def test_logits_that_are_shifted_by_hand_are_left_as_they_are():
    def step(model, x):
        logits = model.head(model.embed(x))[:, :-1]
        return functional.cross_entropy(logits.reshape(-1, VOCABULARY), x[:, 1:].reshape(-1))

    model, x, _ = text()
    plan = lowtide.plan(lambda x: step(model, x), x, budget="min", split=True)
    assert not plan.split
    assert any("nothing is split" in note for note in plan.notes)


def test_what_is_asked_for_is_checked():
    for wrong in (1, 0.5, "head", -3):
        with pytest.raises(LowtideError, match="split="):
            Options.make("1MiB", split=wrong)


def test_with_sketches_it_is_refused():
    model, x, y = text()
    lowtide.sketch(model, layers="head")
    with pytest.raises(LowtideError, match="sketch"):
        lowtide.plan(model, x, y, budget="1GiB", split=True)


@pytest.mark.inductor
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiled(dtype):
    model, x, y = text(dtype)
    without = lowtide.plan(model, x, y, budget="min", executor="inductor").peak
    found = lowtide.verify(
        model, x, y, budget=without * 2 // 3, split=True, executor="inductor", prices="roofline"
    )
    assert found.ok
    assert found.verdict == "to rounding"
    assert found.measured <= without * 2 // 3
    assert found.plan.split


def deferred_step():
    model, x, y = text(logits=True)
    twin = copy.deepcopy(model)
    lowtide.cap(twin, "min", split=4, prices="roofline")
    return twin, twin(x, y), model(x, y)


READS = {
    "an operator": lambda z: z.argmax(-1),
    "numpy": lambda z: torch.from_numpy(z.detach().numpy()),
    "a list": lambda z: torch.tensor(z.tolist()),
    "an index": lambda z: z[0, 1],
    "a copy": lambda z: copy.deepcopy(z.detach()),
    "a file": lambda z: pickle.loads(pickle.dumps(z.detach())),
}


def test_logits_that_nobody_reads_are_never_there_and_the_others_are_right():
    model, (loss, logits), (expected, whole) = deferred_step()
    assert isinstance(logits, Deferred)
    assert logits.shape == whole.shape
    assert logits.requires_grad
    logits_bytes = whole.numel() * whole.element_size()
    assert lowtide.plan_of(model).peak < 1.2 * logits_bytes
    assert any("computed when it is first read" in note for note in lowtide.plan_of(model).notes)
    torch.testing.assert_close(loss, expected)
    for name, read in READS.items():
        torch.testing.assert_close(read(logits), read(whole), msg=name)
    loss.backward()
    torch.testing.assert_close(logits + 0, whole)


def test_deferred_logits_of_other_weights_and_gradients_for_deferred_logits_are_refused():
    model, (loss, logits), _ = deferred_step()
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    with pytest.raises(LowtideError, match="Read it before"):
        logits.sum()
    loss, logits = model(*text()[1:])
    with pytest.raises(lowtide.UnsupportedBackward, match="differentiate"):
        (loss + logits.square().mean()).backward()
