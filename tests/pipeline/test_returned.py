"""Who holds what a step returned when its backward begins, and plans for what the caller does."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import lowtide
from lowtide import _torch
from lowtide.entry.in_place import capped_of
from lowtide.plans.returning import let_go_of
from short_search import short_search
from small_models import gradients, same

ROWS, WIDTH, CLASSES = 128, 32, 64


@pytest.fixture(autouse=True)
def _short_search():
    with short_search():
        yield


class Head(nn.Module):
    """Returns its logits beside the loss, as language models do; the backward reads a softmax of them."""

    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(WIDTH, CLASSES)
        self.head = nn.Linear(CLASSES, CLASSES)

    def forward(self, x):
        hidden = torch.tanh(self.hidden(x))
        logits = self.head(hidden)
        return self.results(hidden, logits, logits.log_softmax(-1).pow(2).mean())

    def results(self, hidden, logits, loss):
        return {"loss": loss, "logits": logits}


class SavedBeside(Head):
    """Returns what its backward reads, too."""

    def results(self, hidden, logits, loss):
        return {"loss": loss, "hidden": hidden, "halves": logits.chunk(2), "none": None}


def batch(rows=ROWS):
    return torch.rand(rows, WIDTH, generator=torch.Generator().manual_seed(0))


def letting_go(model, x):
    model(x)["loss"].backward()


def holding(model, x):
    out = model(x)
    out["loss"].backward()


def holding_a_view(model, x):
    out = model(x)
    loss, _row = out["loss"], out["logits"][0]
    del out
    loss.backward()


def capped(model=Head, budget="1GiB", **options):
    torch.manual_seed(0)
    return lowtide.cap(model(), budget, prices="roofline", **options)


def steps(model, *loops, x=None):
    """What each step took, and the plan that it ran by."""
    x = batch() if x is None else x

    def step(loop):
        model.zero_grad()
        loop(model, x)

    found = []
    for loop in loops:
        taken = lowtide.measure(lambda loop=loop: step(loop), device="cpu").peak
        found.append((taken, lowtide.plan_of(model)))
    return found


@pytest.mark.parametrize(
    ("model", "budget"),
    [
        *((Head, "1GiB"), (SavedBeside, "1GiB"), (Head, "min")),
        pytest.param(SavedBeside, "min", marks=pytest.mark.slow),
    ],
)
def test_what_nobody_holds_is_planned_for_from_the_second_step_on(model, budget):
    (first, held), (second, free), (third, same_plan) = steps(capped(model, budget), *3 * [letting_go])
    assert first <= held.peak
    assert free.peak < held.peak or model is SavedBeside
    assert second == third == free.peak
    assert same_plan is free


@pytest.mark.parametrize("loop", [holding, holding_a_view])
def test_what_the_caller_holds_stays_planned_for(loop):
    model = capped(Head, "min")
    for taken, plan in steps(model, loop, loop):
        assert taken == plan.peak
        assert not let_go_of(plan.graph)


@pytest.mark.parametrize("loop", [letting_go, holding])
def test_what_the_backward_saves_is_told_from_what_the_caller_holds(loop):
    """Both hold the storage of an output that is read in the backward."""
    _, (taken, plan) = steps(capped(SavedBeside), loop, loop)
    assert taken == plan.peak
    assert len(let_go_of(plan.graph)) == (2 if loop is letting_go else 0)


def test_outputs_count_one_by_one():
    def holding_hidden(model, x):
        out = model(x)
        loss, _hidden = out["loss"], out["hidden"]
        del out
        loss.backward()

    _, (taken, plan) = steps(capped(SavedBeside), holding_hidden, holding_hidden)
    assert taken == plan.peak
    assert [plan.graph.writer[name].module for name in let_go_of(plan.graph)] == ["head"]


@pytest.mark.parametrize("budget", ["1GiB", pytest.param("min", marks=pytest.mark.slow)])
def test_a_caller_who_holds_after_all_is_told_once_and_plans_do_not_swing(budget, capsys):
    model = capped(Head, budget)
    found = steps(model, letting_go, letting_go, holding, holding, letting_go, holding)
    (over, free), later = found[2], found[3:]
    assert let_go_of(free.graph)
    assert over - free.peak == ROWS * CLASSES * 4
    assert all(taken <= plan.peak and not let_go_of(plan.graph) for taken, plan in later)
    assert len({plan.peak for _, plan in later}) == 1
    said = [line for line in capsys.readouterr().err.splitlines() if "still held" in line]
    assert len(said) == 1
    assert "32.00 KiB that Head returned (head, test_returned.py:" in said[0]
    assert "takes up to 32.00 KiB more than planned" in said[0]


def floors():
    """The smallest peaks where the outputs are held, and where nobody holds them."""
    torch.manual_seed(0)
    model = Head()
    plans = [lowtide.plan(model, batch(), budget="min", outputs=who) for who in ("held", "free")]
    return [plan.peak for plan in plans]


def test_a_budget_between_the_floors_is_kept_from_the_first_step_on():
    held, free = floors()
    model = capped(Head, (held + free) // 2)
    for taken, plan in steps(model, letting_go, letting_go):
        assert taken == plan.peak <= plan.budget < held
    expected = Head()
    expected.load_state_dict(model.state_dict())
    letting_go(expected, batch())
    assert same(gradients(model), gradients(expected))


def test_a_budget_between_the_floors_refuses_a_backward_whose_outputs_are_held():
    held, free = floors()
    model = capped(Head, (held + free) // 2)
    out = model(batch())
    with pytest.raises(lowtide.UnsupportedBackward, match="can be kept only where nobody holds them"):
        out["loss"].backward()
    assert gradients(model) == [None] * 4
    del out
    letting_go(model, batch())  # the loop that was changed goes on
    assert None not in gradients(model)


def test_a_budget_below_both_floors_is_refused_before_anything_runs():
    model = capped(Head, floors()[1] - 1)
    with pytest.raises(lowtide.BudgetTooSmall) as refused:
        model(batch())
    assert refused.value.smallest == floors()[0]


def test_another_shape_is_planned_for_the_same_caller_at_once():
    model = capped()
    steps(model, letting_go, letting_go)
    ((taken, plan),) = steps(model, letting_go, x=batch(2 * ROWS))
    assert taken == plan.peak
    assert let_go_of(plan.graph)


def test_bits_stay_those_of_plain_pytorch():
    model = capped(SavedBeside, "min")
    plain = copy.deepcopy(lowtide.uncap(capped(SavedBeside)))
    letting_go(plain, batch())
    for _ in range(3):
        model.zero_grad()
        letting_go(model, batch())
        assert same(gradients(model), gradients(plain))


class Odd(SavedBeside):
    """Shares a weight, draws, and writes to buffers."""

    def __init__(self):
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(CLASSES), nn.Dropout(0.5)
        self.tied = nn.Linear(CLASSES, CLASSES)
        self.tied.weight = self.head.weight

    def forward(self, x):
        hidden = self.drop(self.norm(torch.tanh(self.hidden(x))))
        logits = self.tied(self.head(hidden))
        return self.results(hidden, logits, logits.log_softmax(-1).pow(2).mean())


@pytest.mark.parametrize("model", [Head, Odd])
def test_the_second_plan_takes_the_trace_of_the_first(model, monkeypatch):
    traced, stages = [], _torch.private("aot_stages")
    trace = stages.aot_dispatch_autograd_graph

    def counted(*args, **options):
        traced.append(args)
        return trace(*args, **options)

    monkeypatch.setattr(stages, "aot_dispatch_autograd_graph", counted)
    many, plain = capped(model, "min"), copy.deepcopy(lowtide.uncap(capped(model)))
    plans = []
    for seed in range(4):
        for each in (plain, many):
            torch.manual_seed(seed)
            each.zero_grad()
            letting_go(each, batch())
        plans.append(lowtide.plan_of(many))
        assert same(gradients(many), gradients(plain))
        assert same(many.buffers(), plain.buffers())
    assert plans[0] is not plans[1] is plans[3]
    assert len(traced) == 1


def test_what_is_traced_after_the_joint_graph_is_not_taken_for_the_step(monkeypatch):
    front, stages = _torch.private("aot_autograd"), _torch.private("aot_stages")
    monkeypatch.setattr(stages, "aot_dispatch_autograd_graph", lambda *, fw_metadata: ["graph"])
    own = front.prepare_aot_module_simplified
    with _torch.JointTrace().in_use():
        assert front.prepare_aot_module_simplified is not own
        stages.aot_dispatch_autograd_graph(fw_metadata=SimpleNamespace())
        assert front.prepare_aot_module_simplified is own


def test_a_loop_that_is_expected_to_let_go_is_planned_for_at_once(capsys):
    model = capped(Head, "min")
    capped_of(model).caller.holds.expected_to_let_go = True
    for taken, plan in steps(model, letting_go, letting_go):
        assert taken == plan.peak
        assert let_go_of(plan.graph)
    _, (taken, plan) = steps(model, holding, holding)
    assert taken == plan.peak
    assert not let_go_of(plan.graph)
    assert capsys.readouterr().err.count("still held") == 1


def test_held_and_free_are_taken_at_their_word(capsys):
    for taken, plan in steps(capped(outputs="held"), letting_go, letting_go):
        assert taken < plan.peak
        assert not let_go_of(plan.graph)
    for taken, plan in steps(capped(outputs="free"), letting_go, letting_go):
        assert taken == plan.peak
    steps(capped(outputs="free"), holding, holding)
    assert capsys.readouterr().err.count("since it was told so") == 1


def test_a_plan_of_its_own_for_a_caller_who_lets_go_can_be_followed():
    model = Head()
    plan = lowtide.plan(model, batch(), budget="min", outputs="free")
    lowtide.cap(model, plan=plan, prices="roofline")
    ((taken, followed),) = steps(model, letting_go)
    assert taken == followed.peak == plan.peak


@pytest.mark.parametrize("who", [pytest.param("held", marks=pytest.mark.slow), "free"])
def test_verify_lets_go_where_it_is_asked_to(who):
    found = lowtide.verify(Head(), batch(), budget="min", prices="roofline", outputs=who)
    assert found.ok, found
    assert found.measured == found.predicted == floors()[who == "free"]


def test_a_loss_outside_leaves_outputs_held():
    net = lowtide.cap(nn.Linear(WIDTH, CLASSES), "1GiB", prices="roofline")
    for _ in range(2):
        nn.functional.mse_loss(net(batch()), torch.zeros(ROWS, CLASSES)).backward()
    assert not let_go_of(lowtide.plan_of(net).graph)


def test_the_backend_looks_at_its_caller_too():
    model = Head()
    compiled = torch.compile(model, backend="lowtide", options={"budget": "1GiB", "prices": "roofline"})
    for _ in range(3):
        model.zero_grad()
        taken = lowtide.measure(lambda: letting_go(compiled, batch()), device="cpu").peak
    free = lowtide.plan(Head(), batch(), outputs="free")
    assert taken == free.peak


@pytest.mark.parametrize("more", [{"executor": "inductor"}, {"allow_breaks": True}])
def test_free_is_refused_where_outputs_count_as_held(more):
    with pytest.raises(lowtide.LowtideError, match="is for the eager executor and steps of one graph"):
        lowtide.cap(Head(), "1GiB", outputs="free", **more)


def test_a_note_says_what_a_plan_counts_on():
    held, free = (lowtide.plan(Head(), batch(), outputs=who) for who in ("auto", "free"))
    assert any('outputs="free" plans for a caller who lets go' in note for note in held.notes)
    assert not any("held" in note for note in free.notes)
