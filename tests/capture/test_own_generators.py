"""Random calls with a `generator=`: plain PyTorch's numbers, replayed from that generator's state."""

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint as checkpoint_with

import lowtide
from lowtide._torch.generators import may_be_arguments
from small_models import gradients, same

pytestmark = pytest.mark.skipif(not may_be_arguments(), reason="this torch traces no generators")

checkpoint = functools.partial(checkpoint_with, use_reentrant=False)
SHARED = torch.Generator()


def standing(x):
    """A tensor whose rows lie as columns."""
    return torch.empty_like(x.t()).t()


DRAWS = {
    "rand": lambda x, g: torch.rand(x.shape, generator=g) > 0.5,
    "randn": lambda x, g: torch.randn(x.shape, generator=g),
    "randint": lambda x, g: torch.randint(0, 2, x.shape, generator=g),
    "bernoulli": lambda x, g: torch.bernoulli(torch.full_like(x, 0.5), generator=g),
    "bernoulli along rows": lambda x, g: torch.bernoulli(standing(x).detach(), 0.5, generator=g),
    "bernoulli_ along columns": lambda x, g: standing(x).bernoulli_(0.5, generator=g),
    "normal_": lambda x, g: torch.empty_like(x).normal_(generator=g),
    "normal": lambda x, g: torch.normal(x.detach(), 1.0, generator=g),
    "poisson": lambda x, g: torch.poisson(x.detach().abs(), generator=g),
    "multinomial": lambda x, g: torch.multinomial(x.detach().abs() + 0.1, x.shape[1], generator=g),
    "unread": lambda x, g: (torch.rand(3, generator=g), torch.rand(x.shape))[1],
    "beside dropout": lambda x, g: (torch.rand(x.shape, generator=g) > 0.3) * functional.dropout(x, 0.3),
    "of all": lambda x, g: torch.rand(x.shape, generator=SHARED),
    "the default one": lambda x, g: torch.rand(x.shape, generator=torch.default_generator),
}


class Drawing(nn.Module):
    """Layers with random numbers between them, from two generators in turn."""

    def __init__(self, draw):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 16), nn.Linear(16, 1)
        self.body = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.generators, self.draw = (torch.Generator(), torch.Generator()), draw
        self.one, self.other = self.generators

    def seeded(self):
        """With all generators at their beginning."""
        for seed, generator in enumerate((torch.default_generator, SHARED, self.one, self.other)):
            generator.manual_seed(seed)
        return self

    def forward(self, x):
        hidden = self.first(x).tanh()
        for layer, generator in zip(self.body, self.generators * 2, strict=True):
            hidden = layer(hidden * self.draw(hidden, generator)).tanh()
        return self.last(hidden).square().mean()


def twin(model):
    made = Drawing(model.draw)
    made.load_state_dict(model.state_dict())
    return made


def loop(model, batches):
    """Gradients of a few steps, and where all generators are then."""
    model.seeded()
    found = []
    for x in batches:
        model.zero_grad()
        model(x).backward()
        found += gradients(model)
    states = (torch.default_generator, SHARED, model.one, model.other)
    return [*found, *(generator.get_state() for generator in states)]


@pytest.mark.slow
@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_numbers_gradients_and_states_are_those_of_plain_pytorch(draw):
    plain, batches = Drawing(draw), [torch.randn(rows, 4) for rows in (256, 256, 192)]
    model = lowtide.cap(twin(plain), "min", prices="roofline")
    assert same(loop(plain, batches), loop(model, batches))


@pytest.mark.parametrize("draw", ["randn", pytest.param("bernoulli_ along columns", marks=pytest.mark.slow)])
def test_a_replay_is_in_the_plan_and_verify_begins_anew(draw):
    model = Drawing(DRAWS[draw]).seeded()
    before = [generator.get_state() for generator in model.generators]
    found = lowtide.verify(model, torch.randn(256, 4), budget="min")
    assert found, str(found)
    assert found.predicted == found.measured
    backward = [step.op for step in found.plan.schedule.backward if isinstance(step, lowtide.Run)]
    assert any(found.plan.graph.op[name].kind == "random" for name in backward)
    assert all(map(torch.equal, before, (generator.get_state() for generator in model.generators)))


def test_another_generator_is_another_step():
    plain, x = Drawing(DRAWS["rand"]), torch.randn(8, 4)
    model = lowtide.cap(twin(plain), "1MiB", prices="roofline")
    for each in (plain, model):
        loop(each, [x])
        each.generators = (torch.Generator().manual_seed(7), torch.Generator().manual_seed(8))
        each.zero_grad()
        each(x).backward()
    assert same(gradients(plain), gradients(model))


@pytest.mark.slow
def test_a_replayed_call_may_name_its_device():
    plain, x = Drawing(lambda x, _: torch.randn(x.shape, device="cpu")), torch.randn(256, 4)
    model = lowtide.cap(twin(plain), "min", prices="roofline")
    assert same(loop(plain, [x]), loop(model, [x]))


def test_a_first_call_that_is_run_plainly_draws_once():
    class Installs(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.generator = nn.Linear(4, 4), torch.Generator()

        def forward(self, x):
            if not hasattr(self, "ready"):
                torch._dynamo.graph_break()
                self.ready = True
            return (self.layer(x) * torch.rand(4, generator=self.generator)).sum()

    torch.manual_seed(0)
    model, alone = Installs(), torch.Generator()
    model.generator.manual_seed(1)
    alone.manual_seed(1)
    lowtide.cap(model, "1MiB", prices="roofline")
    model(torch.ones(2, 4)).backward()
    torch.rand(4, generator=alone)
    assert torch.equal(model.generator.get_state(), alone.get_state())


@pytest.mark.parametrize(
    ("draw", "options", "said"),
    [
        (lambda x, _: torch.rand(x.shape, generator=torch.Generator()), {}, "that the step makes"),
        (lambda x, g: checkpoint(lambda y: y * torch.rand(16, generator=g), x), {}, "as a checkpoint"),
        (lambda x, g: torch.empty_like(x).exponential_(generator=g), {}, "an operator that torch cannot"),
        (lambda x, g: x if torch.rand([], generator=g) < 0.5 else -x, {}, "data-dependent branching"),
        pytest.param(
            *(DRAWS["rand"], {"executor": "inductor"}, 'executor="eager"'),
            marks=pytest.mark.slow,  # for what it imports
        ),
    ],
    ids=["made inside", "in a checkpoint", "not traced", "decides a branch", "compiled"],
)
def test_refusals_name_the_generator(draw, options, said):
    model = lowtide.cap(Drawing(draw), "1MiB", **options)
    with pytest.raises(lowtide.CaptureError, match=said):
        model(torch.ones(2, 4))
