"""Bad input: a message that says what was asked and what is possible, and nothing lost."""

import copy
import re

import pytest
import torch

import lowtide
from lowtide._torch import leaves_may_be_inside
from lowtide.devices.table import host_memory_left
from small_models import WithLoss, gradients, mlp, same


@pytest.fixture
def model():
    return WithLoss(mlp())


@pytest.fixture
def x():
    return torch.randn(256, 32)


@pytest.mark.parametrize("budget", [0, -1, "0GiB", "-5MB", "lots", "8 XiB", "", 1.5, None, True])
def test_nonsense_budgets(model, x, budget):
    with pytest.raises(lowtide.LowtideError, match="budget"):
        lowtide.cap(model, budget)
    assert model._compiled_call_impl is None
    model(x).backward()


@pytest.mark.slow
def test_below_the_floor_says_what_is_possible(model, x):
    model(x).backward()
    before = gradients(model)
    state = copy.deepcopy(model.state_dict())
    random = torch.get_rng_state()
    lowtide.cap(model, "20KiB")
    with pytest.raises(lowtide.BudgetTooSmall) as caught:
        model(x)
    error = caught.value
    assert error.budget == 20 * 1024 < error.smallest
    for word in (
        "20KiB",
        "parameters",
        "gradients",
        "activations",
        "small_models.py",
        f"budget={error.smallest}",
    ):
        assert word in str(error)
    assert sum(error.parts.values()) == error.smallest
    assert same(gradients(model), before)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), state.values(), strict=True))
    assert torch.equal(torch.get_rng_state(), random)
    lowtide.cap(model, error.smallest)
    model(x).backward()


def test_free_is_what_the_step_has_and_what_is_left(model, x, monkeypatch, tmp_path):
    listed = tmp_path / "meminfo"
    listed.write_text("MemFree:  100 kB\nMemAvailable:  2048 kB\n")
    left = host_memory_left(listed)
    assert left == 2048 * 1024
    monkeypatch.setattr("lowtide.devices.memory.host_memory_left", lambda: left)
    plan = lowtide.plan(model, x, budget="free")
    assert plan.budget == left + plan.graph.given_bytes


@pytest.mark.slow
def test_free_is_not_known_of_a_device_that_is_not_here(model, x):
    with pytest.raises(lowtide.BudgetError, match="needs the device at hand"):
        lowtide.plan(model, x, budget="free", device="A100")


@pytest.mark.slow
def test_more_than_the_device_has(model, x):
    lowtide.cap(model, "900TB")
    with pytest.raises(lowtide.BudgetError, match="more than the device"):
        model(x)
    with pytest.raises(lowtide.BudgetError, match="more than the device"):
        lowtide.plan(model, x, budget="200GiB", device="H200")


def test_unknown_names(model, x):
    for options, word in (
        ({"executor": "warp"}, "eager"),
        ({"method": "magic"}, "auto"),
        ({"colour": 1}, "colour"),
        ({"prices": "cheap"}, "measured"),
    ):
        with pytest.raises(lowtide.LowtideError, match=word):
            lowtide.cap(model, "1GiB", **options)
    with pytest.raises(lowtide.LowtideError, match="H200"):
        lowtide.plan(model, x, device="TPU v99")


def test_what_is_not_callable():
    with pytest.raises(lowtide.LowtideError, match="function"):
        lowtide.cap(3, "1GiB")
    with pytest.raises(lowtide.LowtideError, match="not capped"):
        lowtide.uncap(torch.nn.Linear(2, 2))


def test_capped_part_of_a_model(model):
    lowtide.cap(model.net, "1GiB")
    with pytest.raises(lowtide.LowtideError, match="'net' inside"):
        lowtide.cap(model, "1GiB")


@pytest.mark.slow
def test_plan_of_another_model(model, x):
    other = lowtide.plan(WithLoss(mlp(depth=7)), x, budget="80%")
    lowtide.cap(model, plan=other)
    with pytest.raises(lowtide.PlanMismatch, match="another step"):
        model(x)
    other_batch = lowtide.plan(model, x[:128], budget="80%")
    lowtide.cap(model, plan=other_batch)
    with pytest.raises(lowtide.PlanMismatch, match="another step"):
        model(x)


@pytest.mark.slow
def test_cut_short_file(model, x, tmp_path):
    path = lowtide.plan(model, x, budget="80%").save(tmp_path / "plan.json")
    whole = path.read_text()
    path.write_text(whole[: len(whole) // 2])
    with pytest.raises(lowtide.FormatError, match="cut short"):
        lowtide.Plan.load(path)


def test_verify_refuses_a_capped_model_and_an_idle_one(model, x):
    lowtide.cap(model, "1GiB")
    with pytest.raises(lowtide.LowtideError, match="uncap"):
        lowtide.verify(model, x, budget="1GiB")
    lowtide.uncap(model).eval()
    with pytest.raises(lowtide.NothingToTrain, match="eval"):
        lowtide.verify(model, x, budget="1GiB")
    assert model._compiled_call_impl is None


@pytest.mark.parametrize("optimizer", ["adam", torch.optim.Adam])
def test_optimizer_that_is_none(model, optimizer):
    with pytest.raises(lowtide.LowtideError, match=r"torch\.optim\.Optimizer, as in .* not '?[Aa]dam"):
        lowtide.cap(model, "1GiB", optimizer=optimizer)
    assert model._compiled_call_impl is None


@pytest.mark.parametrize(
    ("batch", "kwargs", "said"),
    [
        ((), {}, "WithLoss.forward(x, scale) cannot be called with (): missing a required argument: 'x'"),
        ((1, 2, "60%"), {}, "cannot be called with (int, int, str): too many positional arguments"),
        ((1,), {"labels": 2}, "cannot be called with (int, labels=): got an unexpected keyword argument"),
    ],
)
def test_a_batch_that_the_model_does_not_take(model, batch, kwargs, said):
    with pytest.raises(lowtide.CaptureError, match=re.escape(said)):
        lowtide.plan(model, *batch, kwargs=kwargs)


class ByName(torch.nn.Embedding):
    def forward(self, input_ids=None, labels=None):
        return super().forward(input_ids).sum()


def test_a_dict_that_was_not_handed_over_by_name():
    batch = {"input_ids": torch.ones(3, dtype=torch.long)}
    with pytest.raises(lowtide.CaptureError, match=r"(?s)must be Tensor, not dict.*is kwargs=batch meant"):
        lowtide.plan(ByName(4, 4), batch)
    with pytest.raises(lowtide.CaptureError) as caught:
        lowtide.plan(torch.nn.Linear(4, 4), {"x": 1})
    assert not any("kwargs=batch" in note for note in getattr(caught.value, "__notes__", ()))


def test_an_operator_without_a_fake_is_named_and_nothing_runs(x):
    @torch.library.custom_op("lowtide_tests::without_fake", mutates_args=())
    def without_fake(x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("was run")

    for call in (lambda model: lowtide.plan(model, x), lambda model: lowtide.cap(model, "1GiB")(x)):
        model = torch.nn.Sequential(torch.nn.Linear(32, 4), Calls(without_fake))
        with pytest.raises(lowtide.GraphBreak, match=r"without_fake is an .*torch\.library\.register_fake"):
            call(model)


class Calls(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def test_an_error_of_the_step_leaves_its_buffers_alone(x):
    def raises(x):
        raise ValueError("an odd one")

    model = torch.nn.Sequential(torch.nn.BatchNorm1d(32), Calls(raises))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="an odd one"):
        lowtide.cap(model, "1GiB")(x)
    assert same(model.state_dict().values(), before.values())


def test_an_argument_of_the_model_given_as_an_option(model, x):
    with pytest.raises(lowtide.LowtideError, match=re.escape('kwargs={"x": ...}')):
        lowtide.plan(model, x=x)


def test_branch_on_a_number_taken_from_a_tensor(x):
    def step(weight):
        return weight.sum() if weight.sum().item() > 0 else weight.prod()

    with pytest.raises(
        lowtide.GraphBreak, match=r"test_refusals\.py:\d+: .*\(data-dependent branching: "
    ) as caught:
        lowtide.plan(step, x.requires_grad_())
    assert "_check" not in str(caught.value)


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (lambda weight: weight.sum(dim=7), "IndexError('Dimension out of range ("),
        (lambda weight: weight.view(3, 3).sum(), "RuntimeError(\"shape '[3, 3]' is invalid for input"),
        (lambda weight: weight.sum() * {}["k"], "KeyError("),
    ],
)
def test_errors_of_the_step_itself_are_told_by_its_plan(x, step, said):
    told = rf"^the step itself seems to raise an error: {re.escape(said)}.*test_refusals\.py:\d+\)\n"
    with pytest.raises(lowtide.CaptureError, match=told + r".*test_refusals\.py:\d+, in <lambda>\n"):
        lowtide.plan(step, x.requires_grad_())


@pytest.mark.slow
def test_budget_without_its_unit(model, x):
    with pytest.raises(lowtide.BudgetTooSmall, match='Is a unit missing, as in "50GiB" or "50%"'):
        lowtide.plan(model, x, budget=50)
    with pytest.raises(lowtide.BudgetTooSmall) as caught:
        lowtide.plan(model, x, budget="20KiB")
    assert "unit" not in str(caught.value)
    with pytest.raises(lowtide.BudgetTooSmall) as caught:
        lowtide.plan(model, x, budget="0.01%")
    assert "unit" not in str(caught.value)


def test_a_file_that_cannot_be_written_is_named_as_it_was_asked_for(model, x, tmp_path):
    place = tmp_path / "absent" / "plan.html"
    with pytest.raises(FileNotFoundError) as caught:
        lowtide.plan(model, x).report(place)
    assert caught.value.filename == str(place)


def test_copies_on_each_gpu_are_refused(model):
    with pytest.raises(lowtide.LowtideError, match=r"DataParallel copies .* DistributedDataParallel\("):
        lowtide.cap(torch.nn.DataParallel(model), "1MiB")


class FrozenStart(torch.nn.Sequential):
    """As PEFT leaves a model: the first layer frozen, and a hook that lets its output require gradients."""

    def __init__(self):
        super().__init__(torch.nn.Linear(4, 4).requires_grad_(False), torch.nn.Linear(4, 4))
        self[0].register_forward_hook(lambda layer, inputs, output: output.requires_grad_(True))


@pytest.mark.slow
def test_hooks_that_let_activations_require_gradients_cost_nothing():
    if not leaves_may_be_inside():  # torch 2.11
        with pytest.raises(lowtide.GraphBreak, match="hooks that gradient checkpointing and PEFT hang"):
            lowtide.verify(FrozenStart(), torch.ones(2, 4), budget="min")
        return
    found = lowtide.verify(FrozenStart(), torch.ones(2, 4), budget="min")
    assert found, str(found)
    assert found.predicted == found.measured


def test_hooks_that_let_what_is_returned_require_gradients_are_named():
    model = lowtide.cap(FrozenStart()[0], "1MiB")
    with pytest.raises(lowtide.GraphBreak, match=r"requires_grad_\(\) on .*a tensor.*disable_input_require"):
        model(torch.ones(2, 4))


@pytest.mark.slow
def test_a_share_that_a_smaller_batch_cannot_keep_is_that_of_a_larger_one(x, caplog_lowtide):
    model = WithLoss(mlp(width=32))
    optimizer = torch.optim.AdamW(model.parameters())
    lowtide.cap(model, "70%", optimizer=optimizer)
    model(x).backward()
    larger = lowtide.plan_of(model).budget
    model(x[:4]).backward()
    assert lowtide.plan_of(model).budget == larger
    assert sum("of a smaller batch cannot be kept" in line for line in caplog_lowtide) == 1
    other = lowtide.cap(WithLoss(mlp(width=32)), "70%", optimizer=optimizer)
    with pytest.raises(lowtide.BudgetTooSmall, match="70%"):
        other(x[:4])


@pytest.mark.slow
def test_such_a_share_is_of_one_call_alone(x):
    """As every share: a second call before the backward is not refused for what both take."""
    model = lowtide.cap(WithLoss(mlp(width=32)), "70%", prices="roofline")
    model(x).backward()
    model.zero_grad()
    (model(x[:4]) + model(x)).backward()


@pytest.mark.slow
def test_pieces_of_a_smaller_batch_get_the_share_of_a_larger_one(x, caplog_lowtide):
    class Broken(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = mlp(width=32), mlp(width=32)

        def forward(self, x):
            x = x * self.first(x)
            torch._dynamo.graph_break()
            return self.last(x).pow(2).mean()

    model = lowtide.cap(Broken(), "70%", prices="roofline", allow_breaks=True)
    for _ in range(4):
        for batch in (x, x[:4]):
            model.zero_grad()
            model(batch).backward()
    larger = lowtide.plan_of(model)
    assert larger.peak <= larger.budget
    assert sum("of a smaller batch cannot be kept" in line for line in caplog_lowtide) == 1
