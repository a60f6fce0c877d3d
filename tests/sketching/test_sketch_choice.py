"""Keeping, recomputing or sketching under a cap: which layers keep a sketch, and what the step computes."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import fx, nn

import lowtide
from lowtide.errors import BudgetTooSmall, LowtideError, PlanMismatch
from lowtide.options import Options
from lowtide.sketching import choose as choosing
from lowtide.sketching.decide import MARGIN, Draft, decide
from lowtide.sketching.kinds import KINDS
from lowtide.sketching.marks import Mark, ranked
from lowtide.solve.search.ladder import Rung
from lowtide.stages import Asked
from sketched import WIDTH, Block, WithLoss, gradients, same, step

pytestmark = pytest.mark.slow


def sketch(model, kind="rows", rate=0.25, **options):
    return lowtide.sketch(model, rate if KINDS[kind].has_rate else None, kind=kind, **options)


def capped_step(model, *batch, budget="1GiB", **options):
    """The gradients of a capped step, and its plan."""
    lowtide.cap(model, budget, **{"prices": "roofline", **options})
    found, plan = step(model, *batch), lowtide.plan_of(model)
    lowtide.uncap(model)
    return found, plan


@pytest.fixture
def choose(monkeypatch):
    """Let marks be sketched as a test says, by their place in the step."""

    def install(which):
        def chosen(able, draft):
            return [draft([layers for place, layers in enumerate(able) if which(place)])]

        monkeypatch.setattr(choosing, "ranked", lambda marks, seconds: in_order(marks))
        monkeypatch.setattr(choosing, "decide", chosen)

    return install


def in_order(marks):
    return list(dict.fromkeys(mark.layers for mark in marks))


# The decision itself, on steps that are only numbers.


ROOM = 100


def table(steps, *, room=ROOM):
    """A `draft` that looks steps up by what is sketched, and the names of those that were looked at.

    Steps are (seconds, peak), or (seconds, peak, seconds of running each op once).
    """
    asked = []

    def draft(sketched):
        name = "".join(sketched)
        asked.append(name)
        seconds, peak, *once = steps.get(name, (9.0, 2 * ROOM))
        made = Draft(name, SimpleNamespace(seconds=once[0] if once else 1.0), room)
        made.look = Rung(peak, seconds, np.zeros(0, dtype=np.int32))
        return made

    return draft, asked


def names(drafts):
    return [draft.step for draft in drafts]


def test_exact_without_a_second_look_where_it_costs_next_to_nothing():
    draft, asked = table({"": (1.04, ROOM), "abcd": (0.5, 10)})
    assert names(decide("abcd", draft)) == [""]
    assert asked == [""]


@pytest.mark.parametrize(("seconds", "taken"), [(1.2 / (1 + MARGIN) + 1e-6, ""), (1.1, "a")])
def test_exact_wins_within_the_margin(seconds, taken):
    draft, _ = table({"": (1.2, ROOM), "a": (seconds, ROOM)})
    assert names(decide("a", draft))[0] == taken


def test_the_speed_of_a_sketch_is_no_reason_for_it():
    draft, _ = table({"": (1.3, ROOM), "a": (0.5, ROOM, 0.2)})
    assert names(decide("a", draft))[0] == ""
    draft, _ = table({"": (1.3, ROOM), "a": (0.4, ROOM, 0.2)})
    assert names(decide("a", draft))[0] == "a"


def test_as_few_as_will_do_and_the_least_worth_first():
    fits = dict.fromkeys(("abcdefgh", "efgh", "gh", "h"), (1.0, ROOM))
    draft, _ = table({"": (1.5, ROOM), **fits})
    assert names(decide("abcdefgh", draft)) == ["h", "abcdefgh", ""]


def test_no_choice_is_tried_twice_and_the_tries_have_an_end():
    everything = "abcdefghijklmnop"
    draft, asked = table({"": (9.0, ROOM), everything: (1.0, ROOM)})
    assert names(decide(everything, draft))[0] == everything
    assert len(asked) == len(set(asked)) <= 8


def test_sketches_where_exactness_does_not_fit():
    draft, _ = table({"ab": (2.0, ROOM), "b": (2.05, ROOM)})
    assert names(decide("ab", draft))[0] == "b"


def test_where_neither_fits_the_smaller_one_is_planned_first():
    draft, _ = table({"": (1.5, ROOM + 2), "ab": (1.0, ROOM + 1)})
    assert names(decide("ab", draft)) == ["ab", ""]
    draft, _ = table({"": (1.5, ROOM), "ab": (1.0, ROOM + 1)})
    assert names(decide("ab", draft)) == ["", "ab"]


def test_the_smallest_peak_is_compared_by_peaks():
    steps = {"": (1.0, 100), "ab": (9.0, 60), "b": (9.0, 62)}
    draft, _ = table(steps, room=None)
    assert names(decide("ab", draft))[0] == "b"
    draft, _ = table({**steps, "": (1.0, 61)}, room=None)
    assert names(decide("ab", draft))[0] == ""


# Which sketches are worth least.


def mark(*layers, saved=1, noise=1.0, storage=0):
    return Mark("", (), layers, storage, saved, noise)


def test_inputs_that_are_soon_computed_again_are_worth_least():
    marks = [
        mark("a", storage=1),
        mark("b", storage=2),
        mark("c", noise=0.1, storage=2),
        mark("d", storage=1),
    ]
    assert ranked(marks, {1: 1.0, 2: 2.0}) == [("d",), ("a",), ("b",), ("c",)]


def test_a_layer_is_sketched_in_all_its_calls_or_in_none():
    marks = [mark("a"), mark("b", "c"), mark("d", saved=0), mark("c"), mark("a", "e", saved=0)]
    assert sorted(ranked(marks, {})) == [("a", "e"), ("b", "c")]


# What a captured step computes for a given choice.


def test_with_no_need_the_step_is_that_of_the_unsketched_model():
    model, x = WithLoss(Block()), torch.randn(4, 10, WIDTH)
    plain = step(model, x)
    found, plan = capped_step(sketch(model), x)
    assert same(found, plain)
    assert plan.sketched == ()
    assert "0 of 6 sketched layers keep a sketch" in plan.notes[-1]
    assert not any(op.kind == "random" and "seed" in op.name for op in plan.graph.ops)


@pytest.mark.parametrize("kind", KINDS)
def test_with_every_sketch_the_step_is_that_of_the_sketched_model(kind, choose):
    model, x = (
        sketch(WithLoss(nn.Sequential(nn.Dropout(0.1), nn.Linear(WIDTH, 8))), kind),
        torch.randn(40, WIDTH),
    )
    choose(lambda place: True)
    found, plan = capped_step(model, x)
    assert same(found, step(model, x))
    assert plan.sketched == ("net.1",)


def test_with_some_sketches_the_step_is_that_of_a_model_with_those(choose):
    model, x = WithLoss(Block()), torch.randn(4, 10, WIDTH)
    part = copy.deepcopy(model)
    choose(lambda place: place % 2 == 0)
    found, plan = capped_step(sketch(model), x)
    names = {f"net.{name}" for name in ("attention.query", "attention.key", "attention.value", "mlp.0")}
    assert set(plan.sketched) == names
    assert "4 of 6 sketched layers keep a sketch" in plan.notes[-1]
    assert "net.mlp.0" in plan.notes[-1]
    assert same(found, step(sketch(part, layers=list(names)), x))


def test_always_for_some_layers_and_a_choice_for_others():
    model, x = WithLoss(Block()), torch.randn(4, 10, WIDTH)
    some = sketch(copy.deepcopy(model), layers="net.mlp")
    sketch(model, layers="net.mlp", always=True)
    sketch(model, layers="net.attention")
    found, plan = capped_step(model, x)
    assert same(found, step(some, x))
    assert plan.sketched == ()
    assert "0 of 4" in plan.notes[-1]
    with pytest.raises(LowtideError, match="always=1 must be True or False"):
        sketch(nn.Linear(4, 4), always=1)


class Untidy(nn.Module):
    """A layer that is called twice, tied weights, and inputs that are parts of others."""

    def __init__(self, *, shares=True):
        super().__init__()
        self.twice, self.tied, self.last = (nn.Linear(16, 16) for _ in range(3))
        self.again = self.twice if shares else nn.Linear(16, 16)
        if shares:
            self.tied.weight = self.twice.weight

    def forward(self, x):
        y = self.again(self.twice(x * 1.0)).transpose(1, 2)
        return self.last(self.tied(y[..., :16]) + 0.5)


class Cast(nn.Module):
    """The forward under autocast, and what is called on its result outside of it."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.inner(x)


@pytest.mark.parametrize("cast", [False, True])
def test_untidy_steps(cast, choose):
    """Under autocast without shared weights: a sketched layer adds up their gradients in single precision."""
    model, x = WithLoss(Untidy(shares=not cast)), torch.randn(3, 32, 16)
    model = Cast(model) if cast else model
    always = sketch(copy.deepcopy(model), always=True)
    plain = step(model, x)
    assert same(capped_step(sketch(model), x)[0], plain)
    choose(lambda place: True)
    found, plan = capped_step(model, x)
    assert same(found, step(always, x))
    assert [name.rpartition(".")[2] for name in plan.sketched] == ["twice", "again", "tied", "last"]


class ChangesInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 8)

    def forward(self, x):
        before = self.first(x)
        x.add_(1)
        return (before * self.second(x)).square().mean()


def test_the_input_as_it_was_before_the_step_changed_it():
    model, x = ChangesInput(), torch.randn(20, WIDTH)
    (model.first(x) * model.second(x + 1)).square().mean().backward()
    plain = gradients(model)
    found, plan = capped_step(sketch(model), x)
    assert plan.sketched == ()
    for name, value in plain.items():
        torch.testing.assert_close(found[name], value)


def test_gradients_are_added_to(choose):
    model, x = WithLoss(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))), torch.randn(40, WIDTH)
    part = sketch(copy.deepcopy(model), layers="net.1")
    choose(lambda place: place == 1)
    lowtide.cap(sketch(model), "1GiB", prices="roofline")
    for either in (model, part):
        torch.manual_seed(0)
        either(x).backward()
        either(x).backward()
    assert lowtide.plan_of(model).sketched == ("net.1",)
    assert same(gradients(model), gradients(part))


class Broken(nn.Module):
    """Two pieces with a graph break between them."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = self.first(x * 1.0)
        torch._dynamo.graph_break()
        return self.second(y * 1.0).square().mean()


def test_a_choice_in_each_piece_of_a_broken_step(choose):
    model, x = sketch(Broken()), torch.randn(40, WIDTH)
    expected = step(model, x)
    choose(lambda place: True)
    found, plan = capped_step(model, x, allow_breaks=True)
    assert set(plan.sketched) == {"first", "second"}
    assert same(found, expected)


# Budgets.


class Chain(nn.Module):
    """Layers whose inputs only another product gives again: there a sketch is worth something."""

    def __init__(self, depth=4, width=WIDTH):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))

    def forward(self, x):
        return self.layers(x)


def test_a_budget_gets_as_many_sketches_as_it_needs():
    model, x = sketch(WithLoss(Chain(width=256)), rate=0.1), torch.randn(2048, 256)
    whole = lowtide.plan(model, x, budget="100%")
    assert whole.sketched == ()
    found = lowtide.verify(lambda x: model(x), x, budget="70%", prices="roofline")
    assert found, str(found)
    assert 0 < len(found.plan.sketched) < 4
    assert found.plan.budget == int(0.7 * whole.peak)  # a share is one of the exact step
    exact = lowtide.plan(lowtide.unsketch(model), x, budget=found.plan.budget)
    assert exact.seconds > (1 + MARGIN) * found.plan.seconds


def test_a_budget_that_not_even_sketches_keep_to():
    model, x = sketch(WithLoss(Chain(2)), rate=0.1), torch.randn(256, WIDTH)
    with pytest.raises(BudgetTooSmall, match=r"budget 5% \(\d+ bytes\)"):
        lowtide.plan(model, x, budget="5%")


def test_a_plan_brings_its_choice_along(choose, tmp_path):
    model, x = sketch(WithLoss(Chain(3)), rate=0.1), torch.randn(64, WIDTH)
    choose(lambda place: place == 1)
    expected, plan = capped_step(model, x)
    plan = lowtide.Plan.load(plan.save(tmp_path / "plan.json"))
    assert plan.sketched == ("net.layers.1",)
    choose(lambda place: pytest.fail("the plan has a choice"))
    found, followed = capped_step(model, x, budget=None, plan=plan)
    assert same(found, expected)
    assert (followed.sketched, followed.notes) == (plan.sketched, plan.notes)
    with pytest.raises(PlanMismatch):
        capped_step(lowtide.unsketch(model), x, budget=None, plan=plan)


def test_compiled_graphs_of_other_choices_have_other_names():
    from lowtide.run.inductor.attempt import Attempt, Partitioner

    schedule, graph = lowtide.Schedule((), ()), SimpleNamespace(fingerprint="")
    joint, names = fx.GraphModule({}, fx.Graph()), set()
    for sketched, trimmed in (((), ()), (("a",), ()), (("b",), ()), ((), ("a",))):
        plan = SimpleNamespace(schedule=schedule, graph=graph, sketched=sketched, trimmed=trimmed, split=())
        stage = SimpleNamespace(planned=SimpleNamespace(plan=plan))
        attempt = Attempt(Asked(Options()), lambda *_, stage=stage: stage)
        attempt.lowered(joint, 1)
        names.add(Partitioner(attempt).uuid())
    assert len(names) == 4


@pytest.mark.inductor
def test_as_fused_kernels(choose):
    model, x = WithLoss(Chain(2)), torch.randn(256, WIDTH)
    plain = step(model, x)
    choose(lambda place: place == 1)
    found, plan = capped_step(sketch(model, rate=0.1), x, executor="inductor")
    assert plan.sketched == ("net.layers.1",)
    differ = {name for name in plain if not torch.allclose(found[name], plain[name], rtol=0.01, atol=1e-7)}
    assert differ == {"net.layers.1.weight"}
