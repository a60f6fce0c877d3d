"""Steps as people write them, unchanged, with and without a cap: the same bits after each of three updates.

Each row makes a model and the body of a training loop. Compared are what the body returns, gradients,
buffers, parameters after the optimizer's step and the random state.
"""

import dataclasses
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

import lowtide
from small_models import same

pytestmark = pytest.mark.slow

WIDTH = 8
STEPS = {}


def usual(make):
    """A row: `make` gives a model and, if it is not the usual one, the body of its loop."""
    STEPS[make.__name__] = make
    return make


def numbers(step, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(step))


def batch(step):
    return numbers(step, 16, WIDTH)


def mlp(*between):
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), *between, nn.Linear(WIDTH, 4))


class Calling(nn.Module):
    """Modules under their names, and what is done with them."""

    def __init__(self, forward, **modules):
        super().__init__()
        self.call = forward
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, *args, **kwargs):
        return self.call(self, *args, **kwargs)


def squared(net):
    return Calling(lambda model, x: model.net(x).square().mean(), net=net)


class Frozenness(torch.autograd.Function):
    """A linear layer that computes the gradients that are needed."""

    @staticmethod
    def forward(ctx, x, weight, scale):
        ctx.save_for_backward(x, weight)
        ctx.scale = scale
        return x @ weight.t() * scale

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        to_x = grad @ weight * ctx.scale if ctx.needs_input_grad[0] else None
        to_weight = grad.t() @ x * ctx.scale if ctx.needs_input_grad[1] else None
        return to_x, to_weight, None


@usual
def function_that_asks_what_is_needed():
    def forward(model, x):
        x = Frozenness.apply(x, model.frozen, 0.5).tanh()
        return Frozenness.apply(x, model.trained, 2.0).square().mean()

    frozen = nn.Parameter(torch.randn(WIDTH, WIDTH), requires_grad=False)
    return Calling(forward, frozen=frozen, trained=nn.Parameter(torch.randn(WIDTH, WIDTH)))


class Sorted(torch.autograd.Function):
    """Two outputs, one of whole numbers, and a gradient that may not come."""

    @staticmethod
    def forward(ctx, x):
        values, places = x.sort(dim=-1)
        ctx.mark_non_differentiable(places)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(places)
        return values, places

    @staticmethod
    def backward(ctx, grad, _):
        (places,) = ctx.saved_tensors
        return None if grad is None else torch.zeros_like(grad).scatter(-1, places, grad)


@usual
def function_with_places():
    def forward(model, x):
        values, places = Sorted.apply(model.net(x))
        return (values * (places + 1)).square().mean()

    return Calling(forward, net=mlp())


class Dirty(torch.autograd.Function):
    """Writes to its input."""

    @staticmethod
    def forward(ctx, x):
        x.relu_()
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (x > 0)


@usual
def function_in_place():
    return Calling(lambda model, x: Dirty.apply(model.net(x)).square().mean(), net=mlp())


@usual
def reentrant_checkpoint_with_dropout():
    def forward(model, x):
        return checkpoint(model.inner, model.net(x), use_reentrant=True).square().mean()

    return Calling(forward, net=mlp(), inner=nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3), nn.Tanh()))


@usual
def spectral_and_weight_norm_and_orthogonal():
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    parametrizations.spectral_norm(layers[1])
    parametrizations.orthogonal(layers[2])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        nn.utils.weight_norm(layers[0])
    return squared(nn.Sequential(*layers, nn.utils.spectral_norm(nn.Linear(WIDTH, 4))))


@usual
def parametrization_that_is_cached():
    class Symmetric(nn.Module):
        def forward(self, weight):
            return weight.triu() + weight.triu(1).t()

    layer = nn.Linear(WIDTH, WIDTH)
    parametrize.register_parametrization(layer, "weight", Symmetric())

    def forward(model, x):
        with parametrize.cached():
            return model.layer(torch.tanh(model.layer(x))).square().mean()

    return Calling(forward, layer=layer)


@usual
def averages_of_parameters_in_buffers():
    def forward(model, x):
        y = model.net(x)
        with torch.no_grad():
            model.count += 1
            model.average.lerp_(model.net[0].weight, 0.1)
        return (y - model.average.mean() / model.count).square().mean()

    model = Calling(forward, net=mlp(nn.BatchNorm1d(WIDTH)))
    model.register_buffer("count", torch.zeros((), dtype=torch.long))
    model.register_buffer("average", torch.zeros(WIDTH, WIDTH))
    return model


@usual
def parts_that_are_frozen_on_the_way():
    model = squared(mlp(nn.BatchNorm1d(WIDTH)))

    def step(capped, number):
        model.net[0].requires_grad_(number > 0)
        model.net[2].train(number != 1)
        return loop(capped, number)

    return model, step


@usual
def spectrogram_and_complex_weights():
    def forward(model, x):
        z = torch.fft.fft(model.net(x).to(torch.cfloat) @ model.mix)
        wave = z.conj().resolve_conj().real.flatten()
        spectrum = torch.stft(wave, 16, 4, window=torch.hann_window(16), return_complex=True)
        return spectrum.abs().clamp_min(1e-5).log().square().mean() + z.angle().mean()

    return Calling(forward, net=mlp(), mix=nn.Parameter(torch.randn(4, 4, dtype=torch.cfloat)))


@usual
def bags_of_words():
    def forward(model, words, ends):
        total = model.most(words, ends) + model.total(words, ends) + model.short(words[:4])
        return (total + model.rare(words[:4])).square().mean()

    def step(model, number):
        words = torch.randint(0, 9, (12,), generator=torch.Generator().manual_seed(number))
        loss = model(words, torch.tensor([0, 3, 4, 9]))
        loss.backward()
        return loss

    bags = {"most": nn.EmbeddingBag(9, 4, mode="max"), "total": nn.EmbeddingBag(9, 4, mode="sum")}
    short, rare = nn.Embedding(9, 4, max_norm=1.0), nn.Embedding(9, 4, scale_grad_by_freq=True)
    return Calling(forward, **bags, short=short, rare=rare), step


@usual
def transforms_of_torch_func():
    def forward(model, x):
        each = torch.func.vmap(torch.func.grad(lambda row: model.net(row).sum()))(x)
        y, tangent = torch.func.jvp(model.net, (x,), (torch.ones_like(x),))
        weights = {name: weight * 0.5 for name, weight in model.net.named_parameters()}
        return (
            (y + tangent).square().mean()
            + each.square().mean()
            + torch.func.functional_call(model.net, weights, (x,)).mean()
        )

    return Calling(forward, net=mlp())


@usual
def regions_of_autocast():
    def forward(model, x):
        with torch.autocast("cpu", torch.bfloat16):
            y = model.net(x)
            with torch.autocast("cpu", enabled=False):
                y = model.inner(y.float())
            y = model.last(y)
        return y.float().square().mean()

    return Calling(forward, net=mlp(), inner=nn.Linear(4, 4), last=nn.Linear(4, 4))


@usual
def scaled_loss():
    model, scaler = squared(mlp()), torch.amp.GradScaler("cpu")

    def step(capped, number):
        with torch.autocast("cpu", torch.bfloat16):
            loss = capped(batch(number))
        scaler.scale(loss).backward()
        return loss

    return model, step


@usual
def some_gradients_only():
    model = squared(mlp())

    def step(capped, number):
        loss = capped(batch(number))
        loss.backward(inputs=[model.net[0].weight])
        return loss

    return model, step


@usual
def gradients_by_name():
    model = squared(mlp())

    def step(capped, number):
        loss = capped(batch(number))
        weights = list(model.parameters())
        for weight, grad in zip(weights, torch.autograd.grad(loss, weights), strict=True):
            weight.grad = grad
        return loss

    return model, step


@usual
def gradients_of_the_batch_alone():
    model = squared(mlp()).requires_grad_(False)

    def step(capped, number):
        x = batch(number).requires_grad_()
        capped(x).backward()
        return x.grad

    return model, step


@dataclasses.dataclass
class Output:
    loss: torch.Tensor
    more: dict


@usual
def named_inputs_and_a_dataclass():
    def forward(model, *, x, scale=1.0):
        y = model.net(x)
        return Output(y.square().mean() * scale, {"y": [y, None, "text", 3]})

    def step(model, number):
        output = model(x=batch(number), scale=2.0)
        assert output.more["y"][1:] == [None, "text", 3]
        output.loss.backward()
        return output.loss, output.more["y"][0]

    return Calling(forward, net=mlp()), step


@usual
def accumulated_batches():
    def step(model, number):
        for part in range(3):
            model(numbers(3 * number + part, 4, WIDTH)).div(3).backward()

    return squared(mlp(nn.Dropout(0.2))), step


@usual
def generator_and_critic():
    def forward(model, noise, real):
        made = model.generator(noise)
        return -model.critic(made).mean(), (model.critic(made.detach()) - model.critic(real)).mean()

    def step(model, number):
        losses = model(batch(number), numbers(50 + number, 16, 4))
        sum(losses).backward()
        return losses

    return Calling(forward, generator=mlp(), critic=nn.Linear(4, 1)), step


@usual
def a_part_that_is_compiled():
    inner = torch.compile(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), backend="eager")
    return squared(mlp(inner))


@usual
def fake_quantisation():
    def forward(model, x):
        weight = torch.fake_quantize_per_tensor_affine(model.net[0].weight, 0.02, 0, -128, 127)
        y = functional.linear(x, weight).relu()
        zeros = torch.zeros(WIDTH, dtype=torch.int32)
        return torch.fake_quantize_per_channel_affine(
            y, torch.full((WIDTH,), 0.05), zeros, 1, -128, 127
        ).mean()

    return Calling(forward, net=mlp())


@usual
def samples_of_distributions():
    def forward(model, x):
        mean, spread = model.net(x).chunk(2, dim=1)
        known = torch.distributions.Normal(mean, functional.softplus(spread) + 0.1)
        code = torch.distributions.Categorical(logits=model.net(x))
        order, share = torch.randperm(len(x)), torch.rand(len(x), 1)
        mixed = share * x + (1 - share) * x[order]
        kl = torch.distributions.kl_divergence(known, torch.distributions.Normal(0.0, 1.0))
        hard = functional.gumbel_softmax(model.net(mixed), hard=True)
        return (
            known.rsample().square().mean()
            + kl.mean()
            - code.log_prob(code.sample()).mean()
            + hard[:, 0].mean()
        )

    return Calling(forward, net=mlp())


@usual
def linear_algebra_in_double_precision():
    def forward(model, x):
        y = model.net(x.double())
        gram = y.t() @ y / len(y) + torch.eye(4, dtype=torch.double)
        solved = torch.linalg.solve(gram, y.t()).square().mean()
        return torch.linalg.slogdet(gram)[1] + solved + torch.linalg.eigvalsh(gram).sum()

    return Calling(forward, net=mlp().double())


@usual
def sorted_scattered_and_summed():
    def forward(model, x):
        y = model.net(x)
        best, places = y.topk(2, dim=1)
        held = torch.zeros(4, 4).index_put((places[:, 0],), y, accumulate=True)
        held = held.scatter_reduce(0, places[:4, :1].expand(-1, 4), y[:4], "amax").cummax(0).values
        spread = torch.einsum("bi,bj->bij", best, best).sum()
        return (
            held.logcumsumexp(0).mean()
            + spread
            + y.unfold(1, 2, 1).prod(-1).mean()
            + y.median(1).values.mean()
        )

    return Calling(forward, net=mlp())


def loop(model, step):
    loss = model(batch(step))
    loss.backward()
    return loss


def trained(make, prepare):
    """All that three steps leave behind."""
    torch.manual_seed(0)
    made = make()
    model, step = made if isinstance(made, tuple) else (made, loop)
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.1), []
    prepare(model)
    for number in range(3):
        optimizer.zero_grad()
        torch.manual_seed(number)
        result = step(model, number)
        seen += [
            leaf.detach().clone() for leaf in torch.utils._pytree.tree_leaves(result) if leaf is not None
        ]
        seen += [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        optimizer.step()
        seen += [tensor.clone() for tensor in model.state_dict().values()]
        seen.append(torch.get_rng_state())
    return model, seen


@pytest.mark.parametrize("make", STEPS.values(), ids=STEPS)
def test_a_step_under_the_smallest_cap_leaves_what_the_plain_one_does(make):
    _, expected = trained(make, lambda model: None)
    model, found = trained(make, lambda model: lowtide.cap(model, "min", prices="roofline"))
    assert lowtide.plan_of(model) is not None
    assert same(found, expected)


def test_a_layer_that_is_unfrozen_later_has_gradients():
    net, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), torch.ones(2, 4)
    step = lowtide.cap(lambda x: net(x).square().mean(), "100%", prices="roofline")
    for trains in (False, True):  # torch.compile of torch 2.11 gives none to what was frozen first
        net[0].requires_grad_(trains)
        step(x).backward()
        assert (net[0].weight.grad is not None) is trains
