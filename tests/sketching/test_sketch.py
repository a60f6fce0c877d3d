"""Sketched layers as a user meets them: exact where they promise it, unbiased elsewhere, in place, undone."""

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.measuring.tracker import live_storages
from lowtide.sketching.choice import Choice
from lowtide.sketching.draw import SEED_BYTES
from lowtide.sketching.kinds import KINDS
from sketched import WIDTH, Attention, Block, WithLoss, gradients, same, saved_bytes, saved_storages, step

SHAPES = [(40, WIDTH), (4, 10, WIDTH), (2, 4, 5, WIDTH)]


def sketch(model, kind="strided", rate=0.25, **options):
    return lowtide.sketch(model, rate if KINDS[kind].has_rate else None, kind=kind, **options)


def run(layer, x, weight):
    """The output of a layer and the gradients of its input, weight and bias."""
    x = x.detach().requires_grad_()
    output = layer(x)
    output.backward(weight)
    bias = None if layer.bias is None else layer.bias.grad
    found = output.detach(), x.grad, layer.weight.grad, bias
    layer.zero_grad()
    return found


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "sliced"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_all_but_the_weight_gradient_is_bitwise_exact(shape, dtype, layout, bias):
    layer = nn.Linear(WIDTH, 24, bias=bias, dtype=dtype)
    x = torch.randn(shape, dtype=dtype)
    if layout == "transposed":
        x = x.transpose(0, -2).contiguous().transpose(0, -2) if len(shape) > 2 else x.t().contiguous().t()
    if layout == "sliced":
        x = torch.randn(*shape[:-1], 2 * WIDTH, dtype=dtype)[..., ::2]
    weight = torch.randn(*shape[:-1], 24, dtype=dtype)
    plain = run(layer, x, weight)
    sketched = run(sketch(layer), x, weight)
    for expected, found, name in zip(plain, sketched, ("output", "x", "weight", "bias"), strict=True):
        if name != "weight" and expected is not None:
            assert torch.equal(expected, found), name
            assert expected.stride() == found.stride()
    assert not torch.equal(plain[2], sketched[2])
    assert plain[2].dtype == sketched[2].dtype


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_weight_gradients_are_right_on_average(kind):
    model = sketch(nn.Linear(WIDTH, 8, dtype=torch.float64), kind)
    x, weight = torch.randn(3, 10, WIDTH).double(), torch.randn(3, 10, 8).double()
    exact = weight.flatten(0, 1).t() @ x.flatten(0, 1)
    found = torch.stack([run(model, x, weight)[2] for _ in range(400)])
    along = ((found - exact) * exact).sum((1, 2))
    assert abs(along.mean()) < 4 * along.std() / 20
    distance = (found.mean(0) - exact).square().sum()  # a mean of squares around its own expectation
    assert distance < 2 * (found - exact).square().sum((1, 2)).mean() / 400


@pytest.mark.parametrize("rate", [1, 1.0])
@pytest.mark.parametrize("kind", [name for name in KINDS if KINDS[name].has_rate])
def test_at_rate_one_everything_is_bitwise_exact_and_nothing_is_copied(kind, rate):
    model, x = WithLoss(Block()), torch.randn(4, 10, WIDTH)
    plain, kept = step(model, x), saved_storages(lambda: model(x))[0]
    sketch(model, kind, rate)
    assert same(step(model, x), plain)
    assert sorted(saved_storages(lambda: model(x))[0].values()) == sorted(kept.values())


@pytest.mark.parametrize("kind", KINDS)
def test_kept_bytes_are_those_predicted(kind):
    for shape, dtype in (((40, WIDTH), torch.float32), ((3, 11, WIDTH), torch.bfloat16)):
        layer, x = sketch(nn.Linear(WIDTH, 8, dtype=dtype), kind), torch.randn(shape).to(dtype)
        rate = 0.25 if KINDS[kind].has_rate else 1.0
        expected = Choice(kind, rate).bytes(x.numel() // WIDTH, WIDTH, dtype)
        assert saved_bytes(lambda: layer(x), besides=[layer.weight]) == expected  # noqa: B023  # run at once
        assert saved_bytes(lambda: layer(x.requires_grad_()), besides=[layer.weight]) == expected  # noqa: B023
        tracker = live_storages()
        with tracker.mode:
            output = layer(x.detach().clone())  # with the input goes what is held to share its sketch
        assert tracker.made == expected + output.untyped_storage().nbytes()


def test_a_deep_model_keeps_what_noise_says():
    model, x = WithLoss(nn.Sequential(Block(), Block())), torch.randn(4, 10, WIDTH)
    plain = saved_bytes(lambda: model(x))
    said = lowtide.noise(model, x, rate=0.1).saved
    lowtide.sketch(model, 0.1)
    assert plain - saved_bytes(lambda: model(x)) == said
    before = lowtide.measure(lambda: lowtide.unsketch(copy.deepcopy(model))(x).backward(), device="cpu").peak
    after = lowtide.measure(lambda: model(x).backward(), device="cpu").peak
    assert after < before


def test_frozen_weights_keep_nothing():
    model = sketch(nn.Sequential(nn.Linear(WIDTH, 8), nn.Linear(8, 8)), layers="0")
    x = torch.randn(40, WIDTH)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model[1].bias.requires_grad_()
    state = torch.get_rng_state()
    seen, result = saved_storages(lambda: model(x))
    assert not seen
    assert torch.equal(torch.get_rng_state(), state)
    result.sum().backward()


def test_an_input_without_gradient_and_a_layer_without_bias():
    layer, x = sketch(nn.Linear(WIDTH, 8, bias=False)), torch.randn(40, WIDTH)
    layer(x).sum().backward()
    assert layer.weight.grad.shape == (8, WIDTH)
    assert x.grad is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 7, 41])
def test_any_number_of_rows(rows, kind):
    layer = sketch(nn.Linear(WIDTH, 8), kind)
    for shape in ((rows, WIDTH), (rows, 1, WIDTH)):
        layer.zero_grad()
        x = torch.randn(shape, requires_grad=True)
        layer(x).sum().backward()
        assert layer.weight.grad.shape == (8, WIDTH)
        assert layer.weight.grad.isfinite().all()
        assert x.grad.shape == shape


def test_one_row_without_a_batch_is_exact():
    layer, x, weight = nn.Linear(WIDTH, 8), torch.randn(WIDTH), torch.randn(8)
    plain = run(layer, x, weight)
    assert all(map(torch.equal, plain, run(sketch(layer), x, weight)))


def test_wrong_inputs_are_refused_as_by_the_layer_itself():
    layer, plain = sketch(nn.Linear(WIDTH, 8)), nn.Linear(WIDTH, 8)
    for wrong in (torch.randn(40, WIDTH + 1), torch.randn(40, WIDTH, dtype=torch.float64), torch.tensor(1.0)):
        with pytest.raises(RuntimeError) as expected:
            plain(wrong)
        state = torch.get_rng_state()
        with pytest.raises(type(expected.value)) as found:
            layer(wrong)
        assert str(found.value) == str(expected.value)
        assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype, kind):
    layer, x = nn.Linear(WIDTH, 8), torch.randn(4, 10, WIDTH)

    def cast_run(layer):
        with torch.autocast("cpu", dtype):
            return run(layer, x, torch.ones(4, 10, 8, dtype=dtype))

    plain, sketched = cast_run(layer), cast_run(sketch(layer, kind))
    for index in (0, 1, 3):
        assert torch.equal(plain[index], sketched[index])
    assert [t.dtype for t in plain] == [t.dtype for t in sketched]
    choice = Choice(kind, 0.25 if KINDS[kind].has_rate else 1.0)
    with torch.autocast("cpu", dtype):
        seen, _ = saved_storages(lambda: layer(x))
    assert sum(seen.values()) == choice.bytes(40, WIDTH, dtype)


def test_autocast_at_rate_one_is_bitwise_exact():
    layer, x = nn.Linear(WIDTH, 8), torch.randn(40, WIDTH)

    def cast_run(layer):
        with torch.autocast("cpu", torch.bfloat16):
            return run(layer, x, torch.ones(40, 8, dtype=torch.bfloat16))

    plain = cast_run(layer)
    assert all(map(torch.equal, plain, cast_run(sketch(layer, rate=1))))


@pytest.mark.slow
def test_tied_weights():
    first, second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    second.weight = first.weight
    model, x = nn.Sequential(first, nn.Tanh(), second).double(), torch.randn(40, WIDTH).double()
    exact = step(model, x)
    sketch(model, rate=0.5)
    found = torch.stack([step(model, x, seed=seed)["0.weight"] for seed in range(300)])
    off = ((found - exact["0.weight"]) * exact["0.weight"]).sum((1, 2))
    assert abs(off.mean()) < 4 * off.std() / 300**0.5
    assert same({"b": step(model, x)["2.bias"]}, {"b": exact["2.bias"]})


def test_layers_with_one_input_share_one_sketch():
    model, x = lowtide.sketch(Attention(), 0.25, layers=["query", "key", "value"]), torch.randn(4, 10, WIDTH)
    seen, _ = saved_storages(lambda: (model.query(x), model.key(x), model.value(x)))
    assert sorted(seen.values()) == [SEED_BYTES, 10 * WIDTH * 4]
    results = [model.query(x), model.key(x.view(40, WIDTH)), model.value(x)]
    nodes = [result.grad_fn.saved_tensors for result in results]
    assert all(
        torch.equal(left, right) for left, right in zip(nodes[0], nodes[2], strict=True) if left is not None
    )
    assert nodes[0][2].data_ptr() == nodes[2][2].data_ptr()


def test_an_input_that_was_changed_gets_another_sketch():
    model, x = lowtide.sketch(Attention(), 0.25), torch.randn(40, WIDTH)
    first = model.query(x)
    x.add_(1)
    second = model.key(x)
    assert first.grad_fn.saved_tensors[2].data_ptr() != second.grad_fn.saved_tensors[2].data_ptr()
    assert not torch.equal(first.grad_fn.saved_tensors[2], second.grad_fn.saved_tensors[2])


def test_nothing_is_held_for_sharing():
    model, x = lowtide.sketch(Attention(), 0.25), torch.randn(40, WIDTH)
    scope = model.query.forward.args[2]
    output = model.query(x)
    kept = weakref.ref(output.grad_fn.saved_tensors[2].untyped_storage())
    storage = weakref.ref(x.untyped_storage())
    assert kept() is not None
    del output
    assert kept() is None
    for _ in range(3):
        x.add_(1)
        model.query(x)
    assert len(scope.sketches) == 1
    del x
    assert storage() is None
    assert not scope.sketches


def test_steps_differ_and_equally_seeded_ones_do_not():
    model, x = sketch(WithLoss(Block(dropout=0))), torch.randn(4, 10, WIDTH)
    first, again, other = step(model, x, seed=1), step(model, x, seed=1), step(model, x, seed=2)
    assert same(first, again)
    assert not torch.equal(first["net.mlp.0.weight"], other["net.mlp.0.weight"])
    torch.manual_seed(1)
    runs = []
    for _ in range(2):
        model.zero_grad()
        model(x).backward()
        runs.append(gradients(model)["net.mlp.0.weight"])
    assert not torch.equal(*runs)


def test_layers_do_not_share_a_seed():
    model = sketch(nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))))
    x = torch.randn(40, WIDTH)
    first = model[0](x)
    second = model[1](first)
    assert not torch.equal(first.grad_fn.saved_tensors[0], second.grad_fn.saved_tensors[0])


@pytest.mark.parametrize("kind", ["strided", "rows", "int4"])
@pytest.mark.parametrize("part", ["block", "mlp"])
def test_a_checkpoint_gives_the_same_gradients(part, kind):
    """A sketch that is made again is the same, and dropout masks after it are, too."""
    block = sketch(Block(), kind)
    x = torch.randn(4, 10, WIDTH, requires_grad=True)

    def checkpointed(x):
        if part == "block":
            return checkpoint(block, x, use_reentrant=False)
        block.forward = lambda x: (
            (y := x + block.attention(x)) + checkpoint(block.mlp, y, use_reentrant=False)
        )
        return block(x)

    results = []
    for forward in (block, checkpointed):
        block.zero_grad()
        torch.manual_seed(3)
        found = forward(x)
        found.square().mean().backward()
        results.append({**gradients(block), "output": found.detach(), "after": torch.get_rng_state()})
    assert same(*results)


@pytest.mark.parametrize("way", ["inside", "around", "submodule"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_dropout_after_a_sketch_is_the_same_when_a_checkpoint_runs_it_again(reentrant, way):
    model, masks = WithLoss(nn.Sequential(Block(), Block())), []
    for block in model.net:
        block.mlp[2].register_forward_hook(lambda module, args, output: masks.append(output.detach() == 0))
    lowtide.sketch(model, 0.25)
    x = torch.randn(4, 10, WIDTH, requires_grad=True)

    def parts(x):
        for block in model.net:
            x = checkpoint(block, x, use_reentrant=reentrant)
        return x.square().mean()

    if way == "around":
        checkpoint(model, x, use_reentrant=reentrant).backward()
        pairs = [(0, 2), (1, 3)]
    elif way == "submodule":
        parts(x).backward()
        pairs = [(0, 3), (1, 2)]
    else:
        model.forward = parts
        model(x).backward()
        pairs = [(0, 3), (1, 2)]
    assert len(masks) == 4
    assert all(torch.equal(masks[first], masks[again]) for first, again in pairs)


def test_other_hooks_on_what_autograd_saves():
    """Saved elsewhere: each of the layers that share an input then saves its own."""
    model, x = sketch(WithLoss(Block(dropout=0))), torch.randn(4, 10, WIDTH)
    expected = step(model, x)
    with torch.autograd.graph.save_on_cpu():
        assert same(step(model, x), expected)
    with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.clone, lambda tensor: tensor):
        step(model, x)


def test_rows_with_a_checkpoint():
    model = WithLoss(Block(dropout=0))
    inner = model.net
    lowtide.sketch(model, 0.25, rows="mask")
    x, mask = torch.randn(4, 10, WIDTH), torch.ones(4, 10)
    mask[:, 6:] = 0
    expected = step(model, x, mask)

    class Checkpointed(nn.Module):
        def forward(self, x):
            return checkpoint(inner, x, use_reentrant=False)

    model.net = Checkpointed()
    torch.manual_seed(0)
    inner.zero_grad()
    model(x, mask).sum().backward()
    assert same({f"net.{name}": value for name, value in gradients(inner).items()}, expected)


def test_eval_and_no_grad():
    model, x = sketch(Block()), torch.randn(4, 10, WIDTH)
    model.eval()
    with torch.no_grad():
        state = torch.get_rng_state()
        model(x)
        assert torch.equal(torch.get_rng_state(), state)
    model(x).sum().backward()
    assert model.mlp[0].weight.grad is not None
    with torch.inference_mode():
        inside = torch.randn(4, 10, WIDTH)
        model(inside)
    sketch_of = lowtide.sketch(nn.Linear(WIDTH, 8), 0.25)
    sketch_of(inside.clone()).sum().backward()


def test_second_derivatives_are_refused():
    model, x = (
        sketch(nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh())),
        torch.randn(40, WIDTH, requires_grad=True),
    )
    with pytest.raises(lowtide.UnsupportedBackward, match="create_graph"):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)


def test_backward_twice_and_grad():
    model, x = sketch(nn.Linear(WIDTH, 8)), torch.randn(40, WIDTH)
    result = model(x).sum()
    first = torch.autograd.grad(result, model.weight, retain_graph=True)
    assert torch.equal(first[0], torch.autograd.grad(result, model.weight)[0])


def test_in_place_and_undone():
    model, x = WithLoss(Block()), torch.randn(4, 10, WIDTH)
    plain = step(model, x)
    keys, parameters = list(model.state_dict()), [(n, id(p)) for n, p in model.named_parameters()]
    types, attributes = [type(m) for m in model.modules()], [set(vars(m)) for m in model.modules()]
    assert lowtide.sketch(model) is model
    assert list(model.state_dict()) == keys
    assert [(n, id(p)) for n, p in model.named_parameters()] == parameters
    assert [type(m) for m in model.modules()] == types
    assert not same(step(model, x), plain)
    assert lowtide.unsketch(model) is model
    assert [set(vars(m)) for m in model.modules()] == attributes
    assert not model._forward_pre_hooks
    assert not model._forward_hooks
    assert same(step(model, x), plain)


@pytest.mark.parametrize(
    "again",
    [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), lambda model: saved_and_loaded(model)],
    ids=["deepcopy", "pickle", "torch.save"],
)
def test_copies_are_sketched_and_stand_alone(again):
    model, x = sketch(WithLoss(Block()), rows="mask"), torch.randn(4, 10, WIDTH)
    model(x)
    twin = again(model)
    expected = step(model, x)
    assert same(step(twin, x), expected)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert same(step(twin, x), expected)
    assert twin.net.mlp[0].forward.args[2] is twin.net.mlp[3].forward.args[2]
    assert twin.net.mlp[0].forward.args[2] is not model.net.mlp[0].forward.args[2]
    lowtide.unsketch(twin)
    assert "forward" in vars(model.net.mlp[0])


def saved_and_loaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_state_dict_loads_both_ways():
    model, other = sketch(Block()), Block()
    other.load_state_dict(model.state_dict())
    model.load_state_dict(other.state_dict())


def test_a_model_that_is_let_go_is_freed():
    model = sketch(Block())
    model(torch.randn(4, 10, WIDTH)).sum().backward()
    weak = weakref.ref(model)
    del model
    gc.collect()
    assert weak() is None


def test_functional_call_and_moved_parameters():
    layer, x = sketch(nn.Linear(WIDTH, 8)), torch.randn(40, WIDTH)
    other = {"weight": torch.zeros(8, WIDTH, requires_grad=True), "bias": torch.ones(8)}
    assert torch.equal(torch.func.functional_call(layer, other, (x,)), torch.ones(40, 8))
    layer.double()
    assert layer(x.double()).dtype == torch.float64
    assert torch.equal(layer(input=x.double()), functional.linear(x.double(), layer.weight, layer.bias))


def test_hooks_of_the_user_run():
    layer, seen = sketch(nn.Linear(WIDTH, 8)), []
    layer.register_forward_hook(lambda module, args, output: seen.append("forward"))
    layer.register_full_backward_hook(lambda module, given, made: seen.append("backward"))
    layer(torch.randn(40, WIDTH, requires_grad=True)).sum().backward()
    assert seen == ["forward", "backward"]


def test_distributed_data_parallel(process_group):
    model, x = sketch(WithLoss(Block())), torch.randn(4, 10, WIDTH)
    expected = step(model, x)
    model.zero_grad()
    torch.manual_seed(0)
    nn.parallel.DistributedDataParallel(model)(x).backward()
    assert same(gradients(model), expected)


def test_gradients_add_up():
    model, x = sketch(nn.Linear(WIDTH, 8)), torch.randn(40, WIDTH)
    torch.manual_seed(0)
    model(x).sum().backward()
    once = model.weight.grad.clone()
    torch.manual_seed(0)
    model(x).sum().backward()
    assert torch.equal(model.weight.grad, once + once)


def padded():
    model, x, mask = WithLoss(Block(dropout=0)), torch.randn(4, 10, WIDTH), torch.ones(4, 10)
    mask[:, 6:] = 0
    return model, x, mask


def test_rows_that_are_not_real_are_left_out():
    """With as many kept rows as there are real ones, the layers after the attention are exact."""
    model, x, mask = padded()
    exact = step(model, x, mask)
    lowtide.sketch(model, 0.6, rows="mask", layers="net.mlp")
    found = step(model, x, mask)
    for name, value in found.items():
        torch.testing.assert_close(value, exact[name], msg=name)
    lowtide.unsketch(model)
    lowtide.sketch(model, 0.6, layers="net.mlp")
    assert not torch.allclose(step(model, x, mask)["net.mlp.0.weight"], exact["net.mlp.0.weight"])


def test_rows_by_name_by_function_and_without_a_mask():
    model, x, mask = padded()
    lowtide.sketch(model, 0.3, rows="mask")
    expected = step(model, x, mask)
    plain = step(model, x)
    lowtide.unsketch(model)
    lowtide.sketch(model, 0.3, rows=lambda x, mask: mask.bool())
    assert same(step(model, x, mask), expected)
    lowtide.unsketch(model)
    lowtide.sketch(model, 0.3)
    assert same(step(model, x), plain)
    model.zero_grad()
    torch.manual_seed(0)
    model(x=x, mask=mask).backward()
    assert not same(gradients(model), expected)


def test_a_mask_of_another_batch_is_not_used_outside_of_the_model():
    model, x, mask = padded()
    lowtide.sketch(model, 0.3, rows="mask")
    model(x, mask)
    y = model.net.mlp[0](x)  # torch 2.11 lets go of what is saved when the output is gone
    assert len([t for t in y.grad_fn.saved_tensors if t is not None]) == 2
    assert model.net.mlp[0].forward.args[2].real is not None


def test_a_turned_input_with_a_bias_under_autocast():
    layer, x = nn.Linear(WIDTH, 8), torch.randn(WIDTH, 6, 5).permute(2, 1, 0)
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = layer(x), sketch(layer)(x)
    found.sum().backward()
    assert found.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected)
    assert layer.weight.grad.dtype == torch.float32
