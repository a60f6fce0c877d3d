"""Optimizers as they are handed in: unwrapped, counted, and left as they were, bit for bit."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import lowtide
from lowtide.devices.baseline import optimizer_bytes
from lowtide.devices.optimizers import levels

CPU = torch.device("cpu")
KINDS = sorted(
    name
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type)
    and issubclass(kind, torch.optim.Optimizer)
    and kind is not torch.optim.Optimizer
)
NEEDS_MORE = {"LBFGS": "closure", "SparseAdam": "dense gradients"}
"""Those whose first step is not a call with dense gradients: told, not guessed."""


class ByProperties(torch.optim.Optimizer):
    """As accelerate's AcceleratedOptimizer: an Optimizer by name, whose attributes are another's."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.steps = 0

    state = property(
        lambda self: self.optimizer.state, lambda self, value: setattr(self.optimizer, "state", value)
    )
    param_groups = property(
        lambda self: self.optimizer.param_groups,
        lambda self, value: setattr(self.optimizer, "param_groups", value),
    )
    defaults = property(
        lambda self: self.optimizer.defaults, lambda self, value: setattr(self.optimizer, "defaults", value)
    )

    def step(self, closure=None):
        self.steps += 1
        return self.optimizer.step(closure)

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)


class ByDict:
    """As Lightning's LightningOptimizer: no Optimizer, with the other's attributes in its own dict."""

    def __init__(self, optimizer):
        self.__dict__.update({name: value for name, value in vars(optimizer).items() if name != "step"})
        self.__class__ = type(f"Of{type(optimizer).__name__}", (type(self), type(optimizer)), {})
        self._optimizer = optimizer
        self.steps = 0

    def step(self, closure=None):
        self.steps += 1
        return self._optimizer.step(closure)


class Forwarding:
    """Everything that is read or written is the other's; the name it has it under is nobody's convention."""

    def __init__(self, wrapped):
        vars(self)["wrapped"] = wrapped

    def __getattr__(self, name):
        return getattr(vars(self)["wrapped"], name)

    def __setattr__(self, name, value):
        setattr(vars(self)["wrapped"], name, value)

    def step(self, closure=None):
        return self.wrapped.step(closure)


class WithStateOfItsOwn(torch.optim.Optimizer):
    """Counts, a tensor outside of its state, a setting in no group, an argument that no group has."""

    def __init__(self, params, model, *, both=False):
        super().__init__(params, {"lr": 0.1})
        self.model, self.both = model, both
        self.steps, self.history = 0, []
        self.total = torch.zeros(())

    @torch.no_grad()
    def step(self, closure=None):
        self.steps += 1
        self.model.stepped = self.steps
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.total += p.grad.abs().sum() + torch.rand(())
                    self.history.append(self.steps)
                    self.state[p]["first"] = torch.zeros_like(p)
                    if self.both:
                        self.state[p]["second"] = torch.zeros_like(p)
                    p -= group["lr"] * p.grad


class WithoutState:
    """No Optimizer at all: groups and a step."""

    def __init__(self, params):
        self.param_groups = [{"params": list(params), "lr": 0.1}]
        self.steps = 0

    @torch.no_grad()
    def step(self):
        self.steps += 1
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p -= 0.1 * p.grad


class Matrices(nn.Module):
    """Weights that every optimizer takes: Muon has matrices only."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(24, 24, bias=False) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().sum()


def described(item, seen=None):
    """All that an object holds, deeply: identities of what is shared, bits of tensors."""
    seen = {} if seen is None else seen
    if isinstance(item, torch.Tensor):
        bits = item.detach().clone().contiguous().view(-1).view(torch.uint8).tolist()
        return ("tensor", id(item), item._version, item.dtype, tuple(item.shape), bits)
    if isinstance(item, int | float | str | bytes | bool | None | type | torch.dtype | torch.device):
        return item
    if id(item) in seen:
        return ("again", seen[id(item)])
    seen[id(item)] = len(seen)
    if isinstance(item, dict):
        pairs = [(described(key, seen), described(value, seen)) for key, value in item.items()]
        return (type(item), id(item), pairs)
    if isinstance(item, list | tuple | set):
        return (type(item), id(item) if isinstance(item, list) else 0, [described(one, seen) for one in item])
    if isinstance(item, nn.Module):
        parts = [described(parameter) for parameter in item.parameters()]
        return ("module", id(item), parts, vars(item).get("stepped"))
    return (type(item), id(item), described(getattr(item, "__dict__", {}), seen))


def make(name, model):
    """One of torch's, with the options that make it keep the most."""
    options = {
        "Adam": {"amsgrad": True},
        "AdamW": {"amsgrad": True},
        "SGD": {"momentum": 0.9},
        "RMSprop": {"momentum": 0.9, "centered": True},
    }
    return getattr(torch.optim, name)(model.parameters(), **options.get(name, {}))


@pytest.fixture
def model():
    return Matrices()


@pytest.fixture
def x():
    return torch.randn(32, 24)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_planning_leaves_every_optimizer_of_torch_as_it_was(model, x, name):
    optimizer = make(name, model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    fired = []
    for register in (optimizer.register_step_pre_hook, optimizer.register_step_post_hook):
        register(lambda *_: fired.append("its own"))
    every = register_optimizer_step_post_hook(lambda *_: fired.append("everybody's"))
    held = [optimizer, scheduler]
    before = described(held)
    random = torch.get_rng_state()
    try:
        if name in NEEDS_MORE:
            with pytest.raises(lowtide.LowtideError, match=f"state of {name} before.*{NEEDS_MORE[name]}"):
                lowtide.plan(model, x, optimizer=optimizer)
        else:
            lowtide.cap(model, "1GiB", optimizer=optimizer)(x)
            coming = lowtide.plan_of(model).graph.fixed["optimizer"]
    finally:
        every.remove()
    assert fired == []
    assert described(held) == before
    assert torch.equal(torch.get_rng_state(), random)
    if name in NEEDS_MORE:
        return
    weights = [p.detach().clone() for p in model.parameters()]
    model(x).backward()
    optimizer.step()
    assert fired == ["its own", "its own"]
    assert not any(torch.equal(p, old) for p, old in zip(model.parameters(), weights, strict=True))
    assert optimizer_bytes(optimizer, CPU) == (coming, 0)


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [ByProperties, ByDict, Forwarding, lambda o: ByProperties(ByProperties(o))])
@pytest.mark.parametrize("announced", [lowtide.cap, lowtide.plan])
def test_wrapped_optimizers_train_on(model, x, wrap, announced):
    inner = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(inner, 10)
    wrapped = wrap(inner)
    twin = copy.deepcopy(model)
    expected = torch.optim.Adam(twin.parameters(), lr=0.01)
    held = [inner, wrapped, scheduler]
    before = described(held)
    if announced is lowtide.plan:
        plan = lowtide.plan(model, x, optimizer=wrapped)
    else:
        lowtide.cap(model, "1GiB", optimizer=wrapped)(x)
        plan = lowtide.plan_of(model)
    assert plan.graph.fixed["optimizer"] == sum(8 * p.numel() + 4 for p in model.parameters())
    assert described(held) == before
    for _ in range(3):
        for one, optimizer in ((model, wrapped), (twin, expected)):
            one(x).backward()
            optimizer.step()
            (inner if optimizer is wrapped else optimizer).zero_grad()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
    assert optimizer_bytes(wrapped, CPU) == (plan.graph.fixed["optimizer"], 0)


@pytest.mark.parametrize("both", [False, True])
def test_an_optimizer_with_state_of_its_own_is_left_bit_for_bit(model, x, both):
    optimizer = WithStateOfItsOwn(model.parameters(), model, both=both)
    before, random = described(optimizer), torch.get_rng_state()
    lowtide.cap(model, "1GiB", optimizer=optimizer)(x)
    assert described(optimizer) == before
    assert torch.equal(torch.get_rng_state(), random)
    coming = (1 + both) * sum(p.numel() * 4 for p in model.parameters())
    assert lowtide.plan_of(model).graph.fixed["optimizer"] == coming
    model(x).backward()
    optimizer.step()
    assert (optimizer.steps, model.stepped) == (1, 1)
    assert optimizer_bytes(optimizer, CPU) == (coming, 0)


def test_what_only_has_groups_and_a_step(model, x):
    optimizer = WithoutState(model.parameters())
    before = described(optimizer)
    lowtide.cap(model, "1GiB", optimizer=optimizer)(x)
    assert described(optimizer) == before
    assert "optimizer" not in lowtide.plan_of(model).graph.fixed


def test_large_tensors_of_an_optimizer_are_not_copied(model, x):
    optimizer = WithStateOfItsOwn(model.parameters(), model)
    optimizer.masters = torch.zeros(2**23)
    with pytest.raises(lowtide.LowtideError, match=r"before its first step \(it holds tensors of its own"):
        lowtide.plan(model, x, optimizer=optimizer)


@pytest.mark.slow
def test_several_optimizers_are_announced_together(model, x):
    first = torch.optim.Adam(model.layers[:2].parameters())
    second = ByProperties(torch.optim.SGD(model.layers[2:].parameters(), momentum=0.9))
    together = lowtide.plan(model, x, optimizer=[first, second]).graph.fixed["optimizer"]
    alone = [lowtide.plan(model, x, optimizer=one).graph.fixed["optimizer"] for one in (first, second)]
    assert together == sum(alone)


def test_levels_end_at_the_innermost_and_in_cycles(model):
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    assert levels(ByProperties(ByProperties(inner))) == [inner]
    inner.optimizer = inner
    assert levels(inner) == [inner]
    outer = WithStateOfItsOwn(model.parameters(), model)
    outer.base_optimizer = inner
    assert levels(outer) == [outer, inner]


@pytest.mark.parametrize("bad", [[], [torch.optim.Adam], "adam", object()])
def test_what_is_no_optimizer_is_refused(model, bad):
    with pytest.raises(lowtide.LowtideError, match=r"optimizer= takes a torch\.optim\.Optimizer"):
        lowtide.cap(model, "1GiB", optimizer=bad)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own, where it is imported
def test_the_optimizer_of_this_rank_is_counted(model, x, process_group):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam)
    coming = lowtide.plan(model, x, optimizer=optimizer).graph.fixed["optimizer"]
    model(x).backward()
    optimizer.step()
    assert optimizer_bytes(optimizer, CPU) == (coming, 0)
