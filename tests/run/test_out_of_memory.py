"""Steps that run out of memory: what is said, what is left as it was, and that the next step works."""

import weakref

import pytest
import torch
from torch import nn

import lowtide

CALLS = {"seen": 0, "fails at": 0}
MADE = []
LAYERS = 4


@torch.library.custom_op("lowtide_tests::scarce", mutates_args=())
def scarce(x: torch.Tensor) -> torch.Tensor:
    """Twice as much; a call of a given number finds no memory."""
    CALLS["seen"] += 1
    if CALLS["seen"] == CALLS["fails at"]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    result = 2 * x
    MADE.append(weakref.ref(result))
    return result


scarce.register_fake(torch.empty_like)
scarce.register_autograd(lambda ctx, gradient: scarce(gradient))


def calls(fails_at=0):
    """Count from here on; gives how many there were before."""
    before = CALLS["seen"]
    CALLS.update({"seen": 0, "fails at": fails_at})
    MADE.clear()
    return before


class Scarce(nn.Module):
    def __init__(self, *, norm=False):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(LAYERS))
        self.norms = nn.ModuleList(nn.BatchNorm1d(16) if norm else nn.Identity() for _ in range(LAYERS))

    def forward(self, x):
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = torch.sin(scarce(torch.sin(norm(scarce(layer(x))))))
        return x.square().mean()


def state(model):
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    return [*(value.clone() for value in model.state_dict().values()), *grads]


def same(left, right):
    pairs = zip(left, right, strict=True)
    return all(a is b if a is None or b is None else torch.equal(a, b) for a, b in pairs)


def step(model, x):
    model(x).backward()


def planned(model, x, budget="min", **options):
    """The capped model after a first step, and how often that calls the operator."""
    lowtide.cap(model, budget, prices="roofline", **options)
    step(model, x)
    model.zero_grad()
    calls()
    step(model, x)
    model.zero_grad()
    return calls()


@pytest.mark.parametrize("executor", ["eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_at_every_call_the_step_is_as_if_it_had_not_begun(executor):
    torch.manual_seed(0)
    model, x = Scarce(), torch.randn(256, 16)
    step(model, x)
    plain = state(model)
    model.zero_grad()
    total = planned(model, x, executor=executor)
    assert executor != "eager" or total > 4 * LAYERS  # some of the forward's are recomputed
    before, forward, backward = state(model), 0, 0
    for number in range(1, total + 1):
        calls(fails_at=number)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            step(model, x)
        (said,) = caught.value.args  # as what looks for a batch size asks of it
        assert said.startswith("CUDA out of memory. Tried to allocate 2.00 GiB.")
        assert f"planned for a peak of {peak(model)}" in said
        assert "of this machine" in said
        forward += "The forward of a step" in said
        backward += "The backward of a step" in said
        assert "gradients" in said.partition("are as they were before")[0]
        assert same(state(model), before)
        held = [made for made in MADE if made() is not None]
        assert executor != "eager" or len(held) <= 1  # at most what the operator was given that failed
        calls()
        step(model, x)
        assert same(state(model), plain) or executor != "eager"
        model.zero_grad()
    assert forward == 2 * LAYERS
    assert backward == total - 2 * LAYERS


def peak(model):
    from lowtide.units import format_bytes

    return format_bytes(lowtide.plan_of(model).peak)


def test_a_first_step_that_runs_out_is_planned_for():
    model, x = Scarce(), torch.randn(256, 16)
    lowtide.cap(model, "min", prices="roofline")
    calls(fails_at=2)
    with pytest.raises(torch.OutOfMemoryError, match=r"planned for a peak of .* Parameters, gradients"):
        step(model, x)
    calls()
    step(model, x)
    plan = lowtide.plan_of(model)
    assert plan.peak < plan.uncapped.peak
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.slow
def test_what_is_not_taken_back_is_told():
    model, x = Scarce(norm=True), torch.randn(256, 16)
    total = planned(model, x, budget="100%")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    calls(fails_at=5)
    with pytest.raises(torch.OutOfMemoryError, match=r"not taken back: 2 BatchNorm layers .* All else is"):
        step(model, x)
    now = model.state_dict()
    assert {name for name in now if not torch.equal(now[name], before[name])} == {
        f"norms.{number}.running_{name}" for number in range(2) for name in ("mean", "var")
    }
    calls()
    step(model, x)
    step(model, x)
    calls(fails_at=total)
    with pytest.raises(torch.OutOfMemoryError, match=r"added to those of an earlier backward: .*zero_grad"):
        step(model, x)


def test_gradients_that_hooks_await():
    model, x = Scarce(), torch.randn(256, 16)
    seen = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(seen.append)
    total = planned(model, x)
    seen.clear()
    calls(fails_at=total)
    with pytest.raises(torch.OutOfMemoryError, match=r"gradients were handed to the hooks"):
        step(model, x)
    assert seen
    model.zero_grad()
    calls()
    step(model, x)
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_the_host_runs_out_in_words_of_its_own():
    model, x = Scarce(), torch.randn(256, 16)
    planned(model, x)
    huge = torch.empty(1).expand(2**44, 16)
    with pytest.raises(RuntimeError, match="planned") as caught:
        explain_for(model, lambda: huge.contiguous())
    assert "allocate" in str(caught.value)


def explain_for(model, call):
    from lowtide.run.out_of_memory import explain

    try:
        call()
    except RuntimeError as error:
        explain(error, lowtide.plan_of(model), "forward")
        raise
