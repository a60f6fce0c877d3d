"""Steps that torch captures in pieces: several graphs under one budget."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import lowtide
from small_models import clear, gradients, plain_gradients, same

pytestmark = pytest.mark.slow

QUICKLY = {"allow_breaks": True, "prices": "roofline"}


class Tanhs(nn.Module):
    """Layers; a frame of its own, which torch captures where it leaves the one around it to Python."""

    def __init__(self, width=32, depth=3):
        super().__init__()
        layers = (layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh()))
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        return self.layers(x)


class Broken(nn.Module):
    """Stacks of layers with something between them that torch cannot capture."""

    def __init__(self, *between, shared=False, tail=None):
        super().__init__()
        stack = Tanhs()
        parts = [stack if shared else Tanhs() for _ in range(len(between) + 1)]
        self.parts = nn.ModuleList(parts)
        self.between, self.tail = between, nn.Identity() if tail is None else tail

    def forward(self, x):
        x = self.parts[0](x)
        for part, between in zip(self.parts[1:], self.between, strict=True):
            x = between(x)
            x = part(x)
        return self.tail(x).pow(2).mean()


@torch._dynamo.disable
def nothing(x):
    return x


@torch._dynamo.disable
def eager(x):
    return torch.sin(x * 2) + x


def looked_at(x):
    if x.sum().item() > 1e30:
        x = x + 1
    return x


def step_of(model, *args):
    """One training step: its peak, and whether its gradients are plain PyTorch's."""
    clear(model)
    peak = lowtide.measure(lambda: model(*args).backward(), device="cpu").peak
    return peak


def two_steps(model, budget, x, **options):
    """The peaks of two capped steps, whose gradients must be those of plain PyTorch."""
    expected = plain_gradients(model, x)
    lowtide.cap(model, budget, **{**QUICKLY, **options})
    peaks = []
    for _ in range(2):
        peaks.append(step_of(model, x))
        assert same(gradients(model), expected)
    return peaks


@pytest.fixture
def x():
    torch.manual_seed(0)
    return torch.randn(256, 32)


@pytest.mark.parametrize(
    "between", [(nothing,), (nothing, nothing), (eager,), (looked_at,), (eager, looked_at)]
)
@pytest.mark.parametrize("share", ["min", "75%", "100%"])
def test_predicted_is_measured(x, between, share):
    model = Broken(*between)
    _, peak = two_steps(model, share, x)
    plan = lowtide.plan_of(model)
    assert plan.budget is None or plan.peak <= plan.budget
    assert peak == plan.peak


@pytest.mark.parametrize("share", ["min", "75%", "100%"])
def test_what_follows_the_last_piece_is_counted(x, share):
    """Its own backward frees what it has saved, before the backward of the last piece begins."""
    model = Broken(nothing, tail=torch._dynamo.disable(nn.Linear(32, 32)))
    two_steps(model, share, x)
    peak = step_of(model, x)
    plan = lowtide.plan_of(model)
    assert peak == plan.peak
    assert any(note.startswith("after piece 2") for note in plan.notes)
    assert not any(note.startswith("between pieces 1 and 2") for note in plan.notes)  # it takes nothing


@pytest.mark.parametrize("between", [(nothing, nothing), (eager, nothing)])
def test_a_piece_that_runs_more_than_once_has_a_plan_for_each_turn(x, between):
    model = Broken(*between, shared=True)
    _, peak = two_steps(model, "75%", x)
    plan = lowtide.plan_of(model)
    assert peak == plan.peak <= plan.budget
    assert any("piece 1 saves" in note and ", 3 saves" in note for note in plan.notes)


class Folds(nn.Module):
    def forward(self, x):
        return x.clone().view(2, -1)


class Unfolds(nn.Module):
    def forward(self, x):
        return x.view(-1, 32)


def test_a_piece_may_be_a_view_alone(x):
    model = Broken(nothing, nothing, nothing)
    model.parts[1], model.parts[2] = Folds(), Unfolds()
    _, peak = two_steps(model, "min", x)
    assert peak == lowtide.plan_of(model).peak


class Outside(nn.Module):
    """Begins and ends with layers that torch does not capture, one of which is read twice."""

    def __init__(self):
        super().__init__()
        self.table, self.body = nn.Embedding(64, 32), Tanhs()

    @torch._dynamo.disable
    def looked_up(self, tokens):
        return self.table(tokens)

    @torch._dynamo.disable
    def scored(self, x):
        return (x @ self.table.weight.t()).logsumexp(-1).mean()

    def forward(self, tokens):
        x = self.looked_up(tokens)
        x = self.body(x)
        return self.scored(x)


@pytest.mark.parametrize("share", ["min", "100%"])
def test_what_no_piece_reads_is_counted(share):
    torch.manual_seed(0)
    model, tokens = Outside(), torch.randint(64, (256,))
    _, peak = two_steps(model, share, tokens)
    plan = lowtide.plan_of(model)
    assert plan.graph.fixed["read between pieces"] == model.table.weight.nbytes + tokens.nbytes
    assert peak == plan.peak


class OfNumPy(torch.autograd.Function):
    """An activation that torch sees neither made nor differentiated."""

    @staticmethod
    def forward(ctx, x):
        y = torch.from_numpy(np.tanh(x.detach().numpy()))
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, gradient):
        (y,) = ctx.saved_tensors
        return gradient * torch.from_numpy(1 - y.numpy() ** 2)


@pytest.mark.parametrize("share", ["min", "75%", "100%"])
def test_memory_of_numpy_is_counted(x, share):
    of_numpy = torch._dynamo.disable(OfNumPy.apply)
    _, peak = two_steps(model := Broken(of_numpy, of_numpy), share, x)
    assert peak == lowtide.plan_of(model).peak


@torch._dynamo.disable
def summed(x):
    wide = x.repeat(1, 8).tanh()
    return torch.stack([wide[:, 32 * i : 32 * i + 32] for i in range(8)]).sum(0)


@pytest.mark.parametrize("share", ["min", "100%"])
def test_sums_of_gradients_between_pieces_are_counted(x, share):
    """Autograd adds up what the slices give, as large as what they are slices of."""
    _, peak = two_steps(model := Broken(summed), share, x)
    assert peak <= lowtide.plan_of(model).peak


class Peeks(nn.Module):
    """Python reads a number of the first piece, which is one of its results."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Tanhs(), Tanhs()

    def forward(self, x):
        y = x + self.first(x)
        if y.sum().item() > 1e30:
            y = y + 1
        return self.second(y).pow(2).mean()


@pytest.mark.parametrize("share", ["min", "100%"])
def test_a_number_that_python_reads_gets_no_gradient(x, share):
    model = Peeks()
    two_steps(model, share, x)
    peak = step_of(model, x)
    plan = lowtide.plan_of(model)
    assert same(gradients(model), plain_gradients(lowtide.uncap(model), x))
    assert peak == plan.peak


class Branching(nn.Module):
    """Two ways that the batch chooses between, both with a break before."""

    def __init__(self):
        super().__init__()
        self.body, self.left, self.right = Tanhs(), Tanhs(), Tanhs(depth=5)

    def forward(self, x):
        x = self.body(x)
        x = self.left(x) if x.sum().item() > 0 else self.right(x)
        return x.pow(2).mean()


def test_another_branch_is_looked_at_and_planned_with_the_first(x, caplog_lowtide):
    model = Branching()
    other = -x
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)
    expected = [plain_gradients(model, batch) for batch in (x, other)]
    lowtide.cap(model, "300KiB", **QUICKLY)
    measured = []
    for batch, wanted in [(x, 0)] * 3 + [(other, 1)] * 4 + [(x, 0), (other, 1)]:
        measured.append((step_of(model, batch), lowtide.plan_of(model).peak))
        assert same(gradients(model), expected[wanted])
    assert all(peak == planned <= 300 * 1024 for peak, planned in measured[-3:])
    assert sum("other pieces" in said for said in caplog_lowtide) == 1


def test_branches_that_alternate_are_planned_in_the_end(x):
    model = Branching()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)
    lowtide.cap(model, "min", **QUICKLY)
    last = [(step_of(model, sign * x), lowtide.plan_of(model).peak) for sign in (1, -1) * 5][-2:]
    assert all(peak == planned for peak, planned in last)


def test_a_loss_outside_has_bytes_set_aside(x):
    class Open(Broken):
        def forward(self, x):
            return self.parts[1](nothing(self.parts[0](x)))

    model, target = Open(nothing), torch.zeros_like(x)
    lowtide.cap(model, "min", **QUICKLY)
    for _ in range(2):
        clear(model)
        peak = lowtide.measure(lambda: nn.functional.mse_loss(model(x), target).backward(), device="cpu").peak
    plan = lowtide.plan_of(model)
    assert plan.graph.boundary == 2 * x.nbytes
    assert peak <= plan.peak + target.nbytes  # which no call of the model reads


class WithHidden(Broken):
    """Returns a result of its first piece beside its loss."""

    def forward(self, x):
        hidden = self.parts[0](x)
        return self.parts[1](nothing(hidden)).pow(2).mean(), hidden


@pytest.mark.parametrize("share", ["min", "75%", "100%"])
def test_gradients_that_the_caller_makes_for_more_results_are_counted(x, share):
    model = WithHidden(nothing)

    def step():
        loss, hidden = model(x)
        (loss + nn.functional.smooth_l1_loss(hidden, x)).backward()

    step()
    expected = gradients(model)
    lowtide.cap(model, share, **QUICKLY)
    for _ in range(3):
        clear(model)
        peak = lowtide.measure(step, device="cpu").peak
        assert same(gradients(model), expected)
    plan = lowtide.plan_of(model)
    assert plan.notes[0].startswith("one budget over 2 pieces")
    assert peak <= plan.peak <= (plan.budget or plan.peak)


class Inside(Broken):
    def forward(self, x):
        self.parts[0](x).pow(2).mean().backward()
        return self.parts[1](x).pow(2).mean()


def test_a_backward_inside_of_the_call_is_told(x, caplog_lowtide):
    two_steps(Inside(nothing), "min", x)
    assert sum("a backward of Inside runs inside of its call" in said for said in caplog_lowtide) == 1
    assert not any("one budget over" in said for said in caplog_lowtide)


class Tails(Broken):
    """A break in a loop, whose layers torch does not capture by themselves."""

    def forward(self, x):
        for layer in self.parts[0].layers:
            x = layer(x) if x.sum().item() < 1e30 else x
        return x.pow(2).mean()


class Fails(torch.autograd.Function):
    """Ends the first backward with an error."""

    calls = 0

    @staticmethod
    def forward(context, x):
        return x * 2

    @staticmethod
    def backward(context, gradient):
        Fails.calls += 1
        if Fails.calls == 1:
            raise ValueError("once")
        return gradient * 2


def test_a_backward_that_ends_with_an_error_is_not_taken_for_the_whole_step(x):
    Fails.calls = 0
    model = lowtide.cap(Broken(torch._dynamo.disable(Fails.apply)), "min", **QUICKLY)
    with pytest.raises(ValueError, match="once"):
        step_of(model, x)
    step_of(model, x)
    assert step_of(model, x) == lowtide.plan_of(model).peak


class TwoTowers(nn.Module):
    """A piece for each of two losses, of which a loop may take one."""

    def __init__(self):
        super().__init__()
        self.left, self.right = Tanhs(), Tanhs(depth=5)

    def forward(self, x):
        losses = []
        for tower in (self.left, self.right):  # a break in a loop: each tower is captured by itself
            losses.append(nothing(tower(x)).pow(2).mean())
        return losses


def test_a_backward_through_more_pieces_than_were_seen_is_told_and_planned(x, caplog_lowtide):
    model = lowtide.cap(TwoTowers(), "min", **QUICKLY)
    measured = []

    def step(both):
        left, right = model(x)
        (left + right if both else left).backward()

    for both in (False,) * 3 + (True,) * 4 + (False,):
        clear(model)
        peak = lowtide.measure(lambda both=both: step(both), device="cpu").peak
        measured.append((peak, lowtide.plan_of(model).peak))
    (told,) = [place for place, line in enumerate(caplog_lowtide) if "goes through pieces" in line]
    assert any("planned together" in line for line in caplog_lowtide[told:])
    assert [peak <= planned for peak, planned in measured[2:]] == [True, False, False, True, True, True]


def test_where_torch_captures_nothing_the_cause_is_told(x):
    with pytest.raises(lowtide.NothingToTrain, match="in a loop"):
        lowtide.verify(Tails(nothing), x, budget="min", **QUICKLY)


def test_evaluation_between_steps_changes_nothing(x):
    model = Broken(nothing)
    two_steps(model, "75%", x)
    plan = lowtide.plan_of(model)
    with torch.no_grad():
        model(x)
    assert step_of(model, x) == plan.peak
    assert lowtide.plan_of(model) is plan


def test_too_small_a_budget_tells_the_smallest_peak_of_the_step(x):
    model = lowtide.cap(Broken(nothing), "min", **QUICKLY)
    for _ in range(2):
        step_of(model, x)
    least = lowtide.plan_of(model).peak
    model = lowtide.cap(lowtide.uncap(model), least - 1, **QUICKLY)
    step_of(model, x)
    for _ in range(2):  # the second call is not taken for a first one
        with pytest.raises(
            lowtide.BudgetTooSmall, match="smallest feasible peak found for the pieces"
        ) as caught:
            model(x)
    assert caught.value.smallest == least
    assert sum(caught.value.parts.values()) == least


def test_gradients_of_a_micro_batch_before_are_counted(x):
    model = Broken(nothing)
    plain = copy.deepcopy(model)
    lowtide.cap(model, "320KiB", **QUICKLY)
    for _ in range(3):
        clear(model)
        clear(plain)
        for batch in (x, x + 1):
            plain(batch).backward()
            peak = lowtide.measure(lambda: model(batch).backward(), device="cpu").peak  # noqa: B023
            assert peak <= 320 * 1024
        assert same(gradients(model), gradients(plain))


def peaks_and_plans(model, step, count=4):
    found = []
    for _ in range(count):
        peak = lowtide.measure(lambda: step(model), device="cpu").peak
        found.append((peak, lowtide.plan_of(model)))
    return found


def test_steps_beside_gradients_that_are_there_are_planned_together(x):
    model = lowtide.cap(Broken(nothing), "75%", **QUICKLY)  # a share has no room for them
    *_, (peak, plan) = peaks_and_plans(model, lambda model: model(x).backward())
    assert peak == plan.peak <= plan.budget
    assert plan.notes[0].startswith("one budget over 2 pieces")


def test_steps_beside_calls_in_flight_are_planned_together(x):
    model = lowtide.cap(Broken(nothing), "min", **QUICKLY)
    step_of(model, x)
    step_of(model, x)
    budget = lowtide.plan_of(model).peak + x.nbytes  # less than what two calls hold by their fastest plans
    model = lowtide.cap(lowtide.uncap(model), 2 * budget, **QUICKLY)

    def both(model):
        (model(x) + model(x)).backward()

    *_, (peak, plan) = peaks_and_plans(model, both)
    assert peak <= plan.peak <= plan.budget
    assert plan.notes[0].startswith("one budget over 2 pieces")


def test_a_second_call_holds_less_where_the_first_would_not_keep_its_budget_beside_it(x):
    def both(model):
        (model(x) + model(x)).backward()

    model = lowtide.cap(Broken(nothing), "100%", **QUICKLY)
    whole = step_of(model, x), step_of(model, x)
    model = lowtide.cap(lowtide.uncap(model), whole[1] * 3 // 2, **QUICKLY)
    *_, (peak, plan) = peaks_and_plans(model, both)
    assert peak <= plan.budget
    assert plan.graph.fixed["calls in flight"]
    assert plan.notes[0].startswith("one budget over 2 pieces")


def test_state_of_an_optimizer_is_counted(x):
    model = Broken(nothing)
    optimizer = torch.optim.AdamW(model.parameters())
    lowtide.cap(model, "75%", **QUICKLY)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()
    state = sum(t.nbytes for group in optimizer.state.values() for t in group.values() if t.ndim)
    assert lowtide.plan_of(model).graph.fixed["optimizer"] >= state


def test_a_plan_of_pieces_can_be_saved_and_shown(x, tmp_path):
    model = Broken(eager)
    two_steps(model, "75%", x)
    plan = lowtide.plan_of(model)
    assert lowtide.Plan.load(plan.save(tmp_path / "plan.json")) == plan
    assert "not captured" in plan.report(tmp_path / "plan.html").read_text()
    assert any(
        "pieces 1 and 2" in note and "nothing of that is recomputed" in note for note in plan.notes[1:]
    )


def test_verify_and_watch_follow_the_whole_step(x):
    model = Broken(eager)
    found = lowtide.verify(model, x, budget="75%", **QUICKLY)
    assert found.ok, found
    assert found.predicted == found.measured
    model = Broken(nothing)
    two_steps(model, "75%", x)
    clear(model)
    seen = lowtide.watch(lambda: model(x).backward(), lowtide.plan_of(model))
    assert seen.peak == lowtide.plan_of(model).peak
    assert all(lowtide.plan_of(model).timeline.resident[place] == size for place, size in seen.points.items())
