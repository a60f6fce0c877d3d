"""Full backward hooks of modules in a captured step: as often as in plain PyTorch, with its bits."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_full_backward_hook
from torch.utils.checkpoint import checkpoint

import lowtide
from small_models import gradients, same

# A module none of whose inputs has a gradient: torch says so for each of them.
pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")

SEEN = []
FIXED = torch.ones(3, 4), torch.tensor([0, 1, 2])


class Two(nn.Module):
    """Takes and returns things besides tensors; a loss may read one of its tensors."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, rate, *, more):
        return self.left(x).tanh(), self.right(x) * rate + more, 3


class Hooked(nn.Module):
    """Modules that are called twice, that get no gradient, that hold others."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.words = nn.Linear(4, 8), nn.Embedding(5, 8)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.ReLU())
        self.two, self.last = Two(), nn.Linear(8, 1)

    def forward(self, x, words):
        hidden = self.body(self.body(self.first(x) + self.words(words)))
        return self.last(self.two(hidden, 2.0, more=hidden)[0]).sum()


def note(module, incoming, outgoing):
    SEEN.append((type(module).__name__, incoming, outgoing))


def note_before(module, outgoing):
    SEEN.append((type(module).__name__, outgoing))


def half(module, incoming, outgoing):
    return tuple(None if gradient is None else gradient / 2 for gradient in incoming)


def half_before(module, outgoing):
    return tuple(None if gradient is None else gradient / 2 for gradient in outgoing)


def everywhere(model):
    """Hooks of all kinds on a model, its modules and what they hold."""
    for module in model.modules():
        module.register_full_backward_hook(note)
        module.register_full_backward_pre_hook(note_before)
    for module in (model.body, model.body[2], model.two):
        module.register_full_backward_hook(half)
        module.register_full_backward_pre_hook(half_before)


def batch(rows):
    return torch.randn(rows, 4), torch.randint(0, 5, (rows,))


def loop(model, batches):
    """The gradients of a few steps, and what hooks have seen, as they kept it."""
    SEEN.clear()
    found = []
    for each in batches:
        model.zero_grad()
        model(*each).backward()
        found += gradients(model)
    return found, flat(SEEN)


def flat(seen):
    if isinstance(seen, list | tuple):
        return [item for part in seen for item in flat(part)]
    return [seen]


def alike(left, right):
    return len(left) == len(right) and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a == b
        for a, b in zip(left, right, strict=True)
    )


@pytest.mark.slow
@pytest.mark.parametrize("budget", ["1MiB", "min"])
def test_hooks_see_and_change_what_they_do_in_plain_pytorch(budget):
    plain, batches = Hooked(), [batch(rows) for rows in (6, 6, 4)]
    everywhere(plain)
    model = lowtide.cap(copy.deepcopy(plain), budget, prices="roofline")
    (expected, seen), (found, seen_capped) = (loop(each, batches) for each in (plain, model))
    assert same(expected, found)
    assert alike(seen, seen_capped)


@pytest.mark.slow
def test_hooks_of_all_modules_are_called_too():
    handle = register_module_full_backward_hook(note)
    try:
        plain, batches = Hooked(), [batch(5)]
        model = lowtide.cap(copy.deepcopy(plain), "min", prices="roofline")
        (_, seen), (_, seen_capped) = (loop(each, batches) for each in (plain, model))
    finally:
        handle.remove()
    assert seen
    assert alike(seen, seen_capped)


@pytest.mark.slow
def test_what_hooks_return_is_in_the_plan():
    model = Hooked()
    for module in (model.body, model.body[2], model.two):
        module.register_full_backward_hook(half)
    found = lowtide.verify(model, *batch(64), budget="min")
    assert found, str(found)
    assert found.predicted == found.measured


def test_hooks_that_come_go_and_change_are_those_of_each_call():
    plain = Hooked()
    model, handles = lowtide.cap(copy.deepcopy(plain), "1MiB", prices="roofline"), []

    def hang(hook):
        handles.extend(each.body[0].register_full_backward_hook(hook) for each in (plain, model))

    for hook in (None, half, lambda _, incoming, __: (incoming[0] * 3,)):
        if hook is not None:
            hang(hook)
        assert same(*(loop(each, [FIXED])[0] for each in (plain, model)))
    for handle in handles:
        handle.remove()
    assert same(*(loop(each, [FIXED])[0] for each in (plain, model)))


@pytest.mark.slow
def test_a_module_that_another_takes_the_place_of_is_the_one_that_hooks_get():
    model, got = lowtide.cap(Hooked(), "1MiB", prices="roofline"), []
    model.last.register_full_backward_hook(lambda module, *_: got.append(module))
    for _ in range(2):
        model(*FIXED).backward()
        model.last = copy.deepcopy(model.last)
        model(*FIXED).backward()
        assert got[-1] is model.last


def test_an_error_in_a_hook_is_the_users_and_the_next_step_works():
    plain, wrong = Hooked(), [True]

    def fail(*_):
        if wrong:
            raise KeyError("mine")

    model = lowtide.cap(copy.deepcopy(plain), "1MiB", prices="roofline")
    model.body.register_full_backward_hook(fail)
    with pytest.raises(KeyError, match="mine"):
        model(*FIXED).backward()
    wrong.clear()
    assert same(*(loop(each, [FIXED])[0] for each in (plain, model)))


@pytest.mark.parametrize(
    ("returns", "error", "said"),
    [
        pytest.param(
            *(lambda _, incoming, __: (None,), lowtide.UnsupportedBackward, "returned None for a gradient"),
            marks=pytest.mark.slow,
        ),
        (lambda _, incoming, __: (incoming[0][:1],), lowtide.UnsupportedBackward, r"the shape \(1, 8\)"),
        pytest.param(
            *(lambda _, incoming, __: (), RuntimeError, "got 0, but expected 1"), marks=pytest.mark.slow
        ),
    ],
    ids=["none", "another shape", "too few"],
)
def test_what_a_hook_may_return(returns, error, said):
    model = lowtide.cap(Hooked(), "1MiB", prices="roofline")
    model.last.register_full_backward_hook(returns)
    with pytest.raises(error, match=said):
        model(*FIXED).backward()


class Around(nn.Module):
    """A hooked layer that something calls in its own way."""

    def __init__(self, way):
        super().__init__()
        self.first, self.layer, self.way = nn.Linear(4, 4), nn.Linear(4, 4), way
        self.layer.register_full_backward_hook(half)

    def forward(self, x):
        return self.way(self.layer, self.first(x)).square().mean()


def gradient_of(layer, x, *, again):
    (found,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=again)
    return layer(x) + found


def test_hooks_run_where_the_step_asks_for_a_gradient_itself():
    plain = Around(lambda layer, x: gradient_of(layer, x, again=False))
    model = lowtide.cap(copy.deepcopy(plain), "1MiB", prices="roofline")
    for each in (plain, model):
        each(FIXED[0]).backward()
    assert same(gradients(plain), gradients(model))


@pytest.mark.parametrize(
    ("make", "options", "said"),
    [
        (lambda: Around(lambda layer, x: gradient_of(layer, x, again=True)), {}, "differentiates again"),
        (
            lambda: Around(lambda layer, x: checkpoint(layer, x, use_reentrant=False)),
            {},
            "that no checkpoint",
        ),
        pytest.param(
            *(lambda: Around(lambda layer, x: layer(x)), {"executor": "inductor"}, 'executor="eager"'),
            marks=pytest.mark.slow,  # for what it imports
        ),
    ],
    ids=["differentiated again", "in a checkpoint", "compiled"],
)
def test_refusals_name_the_hook_and_the_way_out(make, options, said):
    model = lowtide.cap(make(), "1MiB", **options)
    with pytest.raises(lowtide.CaptureError, match=f"a backward hook of a module.*{said}"):
        model(FIXED[0])


def test_hooks_keep_no_model_alive():
    model = lowtide.cap(Hooked(), "1MiB", prices="roofline")
    model.last.register_full_backward_hook(lambda *_, model=model: None)
    model(*FIXED).backward()
    seen = weakref.ref(model)
    del model
    gc.collect()
    assert seen() is None
