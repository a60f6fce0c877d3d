"""Keeping, recomputing or sketching under a cap: which layers keep a sketch, and what the step computes."""

import copy
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import lowtide
from lowtide import capture
from lowtide.errors import BudgetTooSmall, LowtideError, PlanMismatch
from lowtide.run.inductor import Partitioner
from lowtide.sketching.decide import MARGIN, Draft, decide
from lowtide.sketching.kinds import KINDS
from lowtide.sketching.marks import Marks
from sketched import WIDTH, Block, WithLoss, gradients, same, step


def sketch(model, kind="strided", rate=0.25, **options):
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
        def chosen(able, draft, *, smallest=False):
            return draft([mark for place, mark in enumerate(able) if which(place)])

        monkeypatch.setattr(Marks, "ranked", lambda marks: marks.found)
        monkeypatch.setattr(capture, "decide", chosen)

    return install


# The decision itself, on plans that are only numbers.


@dataclass
class Planned:
    seconds: float
    peak: int = 0
    extra: float = 0.0


def table(plans, *, once=1.0):
    """A `draft` that looks plans up by what is sketched, and the names of those that were planned."""
    asked = []

    def draft(sketched):
        name = "".join(sketched)
        plan = plans.get(name) or plans.get(len(name))

        def make_plan():
            asked.append(name)
            if plan is None:
                raise BudgetTooSmall("too small", budget=1, smallest=2)
            return plan

        return Draft(name, plan.seconds if name and plan else once, make_plan)

    return draft, asked


def test_exact_without_a_second_plan_where_it_costs_next_to_nothing():
    draft, asked = table({"": Planned(1.04, extra=0.04), "abcd": Planned(0.5)})
    assert decide("abcd", draft).step == ""
    assert asked == [""]


def test_exact_where_running_each_op_of_the_sketched_step_takes_as_long():
    draft, asked = table({"": Planned(1.2, extra=0.2), "ab": Planned(1.15)})
    assert decide("ab", draft).step == ""
    assert asked == [""]


@pytest.mark.parametrize(("seconds", "taken"), [(1.2 / (1 + MARGIN) + 1e-6, ""), (1.1, "a")])
def test_exact_wins_within_the_margin(seconds, taken):
    draft, _ = table({"": Planned(1.2, extra=0.2), "a": Planned(seconds)})
    assert decide("a", draft).step == taken


def test_the_speed_of_a_sketch_is_no_reason_for_it():
    draft, _ = table({"": Planned(1.06, extra=0.06), "a": Planned(0.2)}, once=1.02)
    assert decide("a", draft).step == ""


def test_as_few_as_will_do_and_the_least_worth_first():
    fits = {name: Planned(1.0) for name in ("abcdefgh", "efgh", "gh", "h")}
    draft, asked = table({"": Planned(1.5, extra=0.5), **fits})
    assert decide("abcdefgh", draft).step == "h"
    assert len(asked) <= 6


def test_no_choice_is_tried_twice_and_the_tries_have_an_end():
    everything = "abcdefghijklmnop"
    draft, asked = table({"": Planned(9.0, extra=0.5), everything: Planned(1.0)})
    assert decide(everything, draft).step == everything
    assert len(asked) == len(set(asked)) <= 6


def test_sketches_where_exactness_does_not_fit():
    draft, _ = table({"ab": Planned(2.0), "b": Planned(2.05)})
    assert decide("ab", draft).step == "b"


def test_too_small_for_either():
    draft, _ = table({})
    with pytest.raises(BudgetTooSmall):
        _ = decide("ab", draft).plan  # the plan is made when it is read
    draft, _ = table({"": Planned(1.5, extra=0.5)})
    assert decide("ab", draft).step == ""


def test_the_smallest_peak_is_compared_by_peaks():
    plans = {"": Planned(1.0, peak=100), "ab": Planned(9.0, peak=60), "b": Planned(9.0, peak=62)}
    draft, _ = table(plans)
    assert decide("ab", draft, smallest=True).step == "b"
    draft, _ = table({**plans, "": Planned(1.0, peak=61)})
    assert decide("ab", draft, smallest=True).step == ""


# What a captured step computes for a given choice.


def test_with_no_need_the_step_is_that_of_the_unsketched_model():
    model, x = WithLoss(Block()), torch.randn(4, 10, WIDTH)
    plain, _ = capped_step(model, x)
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
    assert "net.mlp.*" in plan.notes[-1]
    assert same(found, step(sketch(part, layers=list(names)), x))


def test_layers_that_always_keep_a_sketch_have_no_choice():
    model, x = sketch(WithLoss(Block()), always=True), torch.randn(4, 10, WIDTH)
    found, plan = capped_step(model, x)
    assert same(found, step(model, x))
    assert plan.sketched == ()
    assert not any("sketch" in note for note in plan.notes)
    with pytest.raises(LowtideError, match="always=1 must be True or False"):
        sketch(nn.Linear(4, 4), always=1)


def test_always_for_some_layers_and_a_choice_for_others():
    model, x = WithLoss(Block()), torch.randn(4, 10, WIDTH)
    some = sketch(copy.deepcopy(model), layers="net.mlp")
    sketch(model, layers="net.mlp", always=True)
    sketch(model, layers="net.attention")
    found, plan = capped_step(model, x)
    assert same(found, step(some, x))
    assert "0 of 4" in plan.notes[-1]


class Untidy(nn.Module):
    """A layer that is called twice, tied weights, and inputs that are parts of others."""

    def __init__(self):
        super().__init__()
        self.twice, self.tied, self.last = (nn.Linear(16, 16) for _ in range(3))
        self.tied.weight = self.twice.weight

    def forward(self, x):
        y = self.twice(self.twice(x * 1.0)).transpose(1, 2)
        return self.last(self.tied(y[..., :16]) + 0.5)


@pytest.mark.parametrize("cast", [False, True])
def test_untidy_steps(cast, choose):
    model, x = WithLoss(Untidy()), torch.randn(3, 32, 16)
    always = sketch(copy.deepcopy(model), always=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=cast):
        plain, _ = capped_step(model, x)
        sketch(model)
        exact, plan = capped_step(model, x)
        assert same(exact, plain)
        choose(lambda place: True)
        found, plan = capped_step(model, x)
        assert same(found, capped_step(always, x)[0])
    assert plan.sketched == ("net.twice", "net.twice (2)", "net.tied", "net.last")


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
    model, x = sketch(WithLoss(Block(dropout=0))), torch.randn(4, 10, WIDTH)
    choose(lambda place: place != 1)
    lowtide.cap(model, "1GiB", prices="roofline")
    model(x).backward()
    model(x).backward()
    assert lowtide.plan_of(model).sketched
    assert all(torch.isfinite(grad).all() for grad in gradients(model).values())


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
    whole = lowtide.plan(model, x)
    assert whole.sketched == ()
    assert lowtide.plan(model, x, budget="100%").sketched == ()
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
    schedule, graph = lowtide.Schedule((), ()), SimpleNamespace(fingerprint="")
    names = set()
    for sketched in ((), ("a",), ("b",)):
        plan = SimpleNamespace(schedule=schedule, graph=graph, sketched=sketched)
        piece = SimpleNamespace(plan=plan, options=SimpleNamespace(budget=None))
        names.add(Partitioner(piece).uuid())
    assert len(names) == 3


def test_as_fused_kernels(choose):
    model, x = WithLoss(Chain(3)), torch.randn(256, WIDTH)
    plain, _ = capped_step(model, x, executor="inductor")
    sketch(model, rate=0.1)
    exact, plan = capped_step(model, x, executor="inductor")
    assert plan.sketched == ()
    assert all(torch.allclose(exact[name], plain[name], atol=1e-7) for name in plain)
    choose(lambda place: place == 1)
    found, plan = capped_step(model, x, executor="inductor")
    assert plan.sketched == ("net.layers.1",)
    differ = {name for name in plain if not torch.allclose(found[name], plain[name], rtol=0.01, atol=1e-7)}
    assert differ == {"net.layers.1.weight"}
