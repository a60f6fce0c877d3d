"""On a GPU: the allocator is the judge of the simulator, and recomputation changes no bit."""

import os
import subprocess
import sys

import pytest

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # asked for by deterministic algorithms
import torch
from torch import nn

import lowtide
from lowtide.sketching import choose as choosing
from lowtide.sketching import rounded, strided
from lowtide.sketching.draw import draw_seed
from zoo import ZOO

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a CUDA device; run on a machine with one"
    ),
    pytest.mark.filterwarnings("ignore:.*does not have a deterministic implementation"),
    pytest.mark.filterwarnings("ignore:(Memory Efficient|cuDNN) [aA]ttention defaults"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores for float32 matrix multiplication"),
]

NAMES = ["gpt", "gpt_dropout", "llama", "vit", "resnet", "densenet", "unet_bilinear", "vgg", "mlp_dropout"]

UNSTEADY = {"unet_bilinear": {"outputs 0"}}
"""Where torch itself has no deterministic kernel: the loss over images is summed in any order."""

BLOCK = 2 * 2**20
"""These models take a few MiB; the allocator books a rest of up to 1 MiB with a block."""


def to_cuda(tree):
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.cuda(), tree)


@pytest.fixture(autouse=True)
def repeatable():
    """Without this, convolutions and bilinear upsampling differ from run to run, capped or not."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def cuda_case(name):
    model, args, kwargs = ZOO[name].make()
    return model.cuda(), to_cuda(args), to_cuda(kwargs)


def half_way(model, args, kwargs):
    """A budget half way between what is there before the step and its uncapped peak."""
    lowtide.cap(model, "100% of device")
    model(*args, **kwargs)
    plan = lowtide.plan_of(model)
    lowtide.uncap(model)
    fixed = plan.graph.fixed_bytes + sum(
        v.bytes for v in plan.graph.values if v.kind in ("parameter", "input")
    )
    return (plan.uncapped.peak + fixed) // 2


@pytest.mark.parametrize("name", NAMES)
def test_step_is_exact_and_peak_as_predicted(name):
    model, args, kwargs = cuda_case(name)
    for budget in (half_way(model, args, kwargs), "min"):
        try:
            found = lowtide.verify(model, *args, kwargs=kwargs, budget=budget)
        except lowtide.BudgetTooSmall as error:
            found = lowtide.verify(model, *args, kwargs=kwargs, budget=error.smallest + BLOCK)
        print(name, found)
        assert {*found.different_uncapped} <= UNSTEADY.get(name, set()), found
        assert abs(found.measured - found.predicted) <= max(0.01 * found.predicted, BLOCK), found


def test_other_models_on_the_device_are_counted():
    model, args, kwargs = cuda_case("mlp")
    alone = _peak(model, args, kwargs)
    other = torch.empty(64 * 2**20, dtype=torch.uint8, device="cuda")
    beside = _peak(model, args, kwargs)
    assert abs(beside - alone - other.numel()) <= BLOCK


def test_a_share_is_of_the_step_and_a_share_of_the_device_of_its_memory():
    """The step is large beside what cuBLAS holds, which no plan can take away."""
    layers = [nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(8)]
    net, x = nn.Sequential(*layers).cuda(), torch.randn(2**15, 512, device="cuda")
    plans = []
    for budget in ("100% of device", "60%"):
        step = lowtide.cap(lambda x: net(x).square().mean(), budget)
        step(x).backward()
        plans.append(lowtide.plan_of(step))
        net.zero_grad()
    roomy, plan = plans
    assert roomy.budget == torch.cuda.get_device_properties(0).total_memory
    assert 0.59 <= plan.budget / roomy.allocated <= 0.61
    assert plan.peak <= plan.budget


FIRST_STEP = """
import torch, lowtide
layer, x = torch.nn.Linear(512, 512).cuda(), torch.randn(4096, 512, device="cuda")
step = lowtide.cap(lambda x: layer(x).square().mean(), "100% of device")
step(x).backward()
print(lowtide.plan_of(step).allocated, torch.cuda.max_memory_allocated())
"""


def test_workspaces_that_a_first_step_takes_are_predicted():
    ran = subprocess.run([sys.executable, "-c", FIRST_STEP], capture_output=True, text=True, check=True)
    predicted, measured = map(int, ran.stdout.split())
    assert abs(measured - predicted) <= BLOCK


def _peak(model, args, kwargs):
    lowtide.cap(model, "100% of device")
    model(*args, **kwargs).backward()
    peak = lowtide.plan_of(model).allocated
    lowtide.uncap(model)
    model.zero_grad()
    return peak


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_with_grad_scaler(dtype):
    model, args, kwargs = cuda_case("gpt_dropout")

    class Cast(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, *args, **kwargs):
            with torch.autocast("cuda", dtype):
                return self.inner(*args, **kwargs) * 256.0

    assert lowtide.verify(Cast(), *args, kwargs=kwargs, budget="min").exact


def dropping_cell():
    cell, drop = torch.nn.GRUCell(64, 64, device="cuda"), torch.nn.Dropout(0.2)

    def step(h, x):
        h = cell(drop(x), h).float()  # autocast would make another dtype of the carry
        return h, h.square().mean()

    return cell, step


@pytest.mark.parametrize("budget", ["5%", "20%", "min"])
def test_scan_draws_the_masks_of_the_loop_and_keeps_to_its_budget(budget):
    cell, step = dropping_cell()
    xs, start = torch.randn(60, 32, 64, device="cuda"), torch.zeros(32, 64, device="cuda")

    def loop():
        h, total = start, 0
        for x in xs:
            h, y = step(h, x)
            total = total + y
        return total

    def scanned():
        return lowtide.scan(step, start, xs, reduce="sum", budget=budget)[1]

    gradients = []
    plan = lowtide.scan_plan(step, start, xs, reduce="sum", budget=budget)
    scanned().backward()  # the libraries' own workspace, once for each thread that captures
    for run in (loop, scanned):
        torch.cuda.manual_seed(0)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        gradients.append(torch.autograd.grad(run(), list(cell.parameters())))
        peak = torch.cuda.max_memory_allocated() - before
    for mine, true in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, true)
    whole = sum(parameter.numel() * parameter.itemsize for parameter in cell.parameters())
    assert peak <= plan.peak + 2 * whole + BLOCK


def folded(cell, steps=300, **options):
    """The sum of a cell's outputs over a sequence; plainly without options."""
    xs = torch.linspace(-1, 1, steps * 32 * 64, device="cuda").view(steps, 32, 64)
    h, total = torch.zeros(32, 64, device="cuda"), 0
    if options:
        return lowtide.scan(cell, h, xs, reduce="sum", **options)[1]
    for x in xs:
        h, y = cell(h, x)
        total = total + y
    return total


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("steps", [320, 311])
def test_a_scan_in_graphs_is_bitwise_the_loop_step_after_step(steps, autocast):
    """Under autocast it is the scan without graphs: a plain loop casts weights once, and sums in bfloat16."""
    cell, step = dropping_cell()
    optimizer = torch.optim.SGD(cell.parameters(), 0.1)
    runs = []
    plain = {"budget": "30%", "graphs": False} if autocast else {}
    for options in (plain, {"budget": "30%", "graphs": True}):
        torch.manual_seed(0)
        for parameter in cell.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                total = folded(step, steps, **options)
            total.backward()
            optimizer.step()
        runs.append([total.detach(), torch.rand(1, device="cuda"), *(p.grad for p in cell.parameters())])
    for mine, true in zip(*runs, strict=True):
        assert torch.equal(mine, true)


def test_a_cell_that_waits_for_the_device_runs_step_by_step():
    cell, step = dropping_cell()

    def waiting(h, x):
        return step(h * (1.0 if h.sum().item() < 1e9 else 0.5), x)

    gradients = []
    for options in ({}, {"budget": "30%"}):
        torch.cuda.manual_seed(0)
        gradients.append(torch.autograd.grad(folded(waiting, 64, **options), list(cell.parameters())))
    for mine, true in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, true)
    folded(step, 64, budget="30%", graphs=True).backward()  # the capture that failed bars no other


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("steps", [128, 130])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_recurrent_blocks_agree_with_cudnn(bidirectional, steps, graphs, recwarn):
    factory = {"device": "cuda", "dtype": torch.float64}
    module = torch.nn.LSTM(32, 48, num_layers=2, bidirectional=bidirectional, **factory)
    x = torch.randn(steps, 8, 32, requires_grad=True, **factory)
    results = []
    for net in (module, lowtide.Recurrent(module, budget="50%", chunk=8, graphs=graphs)):
        output, (h, c) = net(x)
        loss = output.square().sum() + h.sum() + c.sum()
        results.append((output, *torch.autograd.grad(loss, [x, *module.parameters()])))
    for mine, true in zip(*results, strict=True):
        torch.testing.assert_close(mine, true, rtol=1e-12, atol=1e-12)
    assert not [warning for warning in recwarn if "contiguous chunk" in str(warning.message)]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU])
def test_recurrent_in_graphs_is_what_it_is_without_step_after_step(kind, autocast):
    module = kind(32, 48, num_layers=2, dropout=0.3, device="cuda")
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    x = torch.randn(64, 8, 32, device="cuda", requires_grad=True)
    runs = []
    for graphs in (False, True):
        torch.manual_seed(0)
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        net = lowtide.Recurrent(module, budget="50%", chunk=8, graphs=graphs)
        for _ in range(3):
            optimizer.zero_grad()
            x.grad = None
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                total = net(x)[0].float().square().mean()
            total.backward()
            optimizer.step()
        runs.append(
            [total.detach(), torch.rand(1, device="cuda"), x.grad, *(p.grad for p in module.parameters())]
        )
    for mine, true in zip(*runs, strict=True):
        torch.testing.assert_close(mine, true)


def test_graphs_of_recurrent_are_predicted_as_well_as_its_calls():
    """cuDNN's workspace, which nobody predicts, is there with graphs and without."""
    module = torch.nn.LSTM(64, 64, device="cuda")
    x = torch.randn(400, 64, 64, device="cuda")
    gradient = torch.randn_like(x)
    beyond = []
    for graphs in (False, True):
        net = lowtide.Recurrent(module, budget="30%", chunk=16, graphs=graphs)
        plan = net.plan(x)
        net(x)[0].backward(gradient)  # the libraries' own workspace, once for each thread that captures
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        net(x)[0].backward(gradient)
        beyond.append(torch.cuda.max_memory_allocated() - before - plan.peak)
    assert beyond[1] <= beyond[0] + BLOCK


@pytest.mark.parametrize("budget", ["1GiB", "min"])
def test_compiled_dropout_has_the_mask_of_the_forward(budget):
    x = torch.ones(4096, 64, device="cuda", requires_grad=True)
    weight = torch.ones(64, device="cuda", requires_grad=True)

    def step(x, weight):
        for _ in range(3):
            x = torch.nn.functional.dropout(x * weight, 0.5)
        return x.sum()

    total = lowtide.cap(step, budget, executor="inductor")(x, weight)
    total.backward()
    kept = x.grad > 0  # 8 where all three masks let through, which is what the sum counts
    assert kept.any()
    assert not kept.all()
    assert total.item() == 8 * kept.sum().item()


@pytest.mark.parametrize("name", ["gpt_dropout", "resnet"])
def test_compiled_steps_agree_with_the_same_executor_uncapped(name):
    model, args, kwargs = cuda_case(name)
    found = lowtide.verify(model, *args, kwargs=kwargs, budget="min", executor="inductor")
    assert found.exact, found
    assert found.measured <= found.predicted + BLOCK


class Chain(torch.nn.Module):
    """Linear layers whose inputs only another product gives again."""

    def __init__(self, depth, width=2048):
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(depth)))

    def forward(self, x):
        return self.layers(x).square().mean()


@pytest.mark.parametrize("executor", ["eager", "inductor"])
@pytest.mark.parametrize("kind", ["strided", "int8"])
def test_sketches_that_a_planner_chose(kind, executor, monkeypatch):
    """Some layers keep a sketch, whatever the prices here say, and others are run again or kept."""
    model, x = Chain(6).cuda(), torch.randn(32768, 2048, device="cuda")
    lowtide.sketch(model, 0.1 if kind == "strided" else None, kind=kind)
    fixed = torch.cuda.memory_allocated()
    roomy = lowtide.verify(model, x, budget="100% of device", executor=executor)
    assert roomy.plan.sketched == ()
    tight = fixed + (roomy.plan.peak - fixed) * 3 // 4
    free = lowtide.verify(model, x, budget=tight, executor=executor)
    monkeypatch.setattr(choosing, "decide", lambda able, draft: [draft(able[2:])])
    forced = lowtide.verify(model, x, budget=tight, executor=executor)
    assert len(forced.plan.sketched) == 3
    assert "layers.0" not in forced.plan.sketched  # the caller holds its input
    for found in (roomy, free, forced):
        print(found, *found.plan.notes, sep="\n")
        assert found.exact, found
        assert abs(found.measured - found.predicted) <= max(0.01 * found.predicted, BLOCK), found


@pytest.mark.parametrize("kind", ["strided", "int4"])
def test_a_sketched_step_in_a_cuda_graph_draws_anew_at_every_launch(kind):
    model, x = Chain(2, 256).cuda(), torch.randn(512, 256, device="cuda")
    model(x).backward()
    exact = model.layers[1].weight.grad.clone()
    lowtide.sketch(model, 0.25 if kind == "strided" else None, kind=kind)
    with torch.cuda.stream(torch.cuda.Stream()):
        model(x).backward()  # compiles the kernels
    torch.cuda.synchronize()
    model.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model(x).backward()
    found = []
    for _ in range(200):
        graph.replay()
        found.append(model.layers[1].weight.grad.clone())
    off = ((torch.stack(found) - exact) * exact).sum((1, 2)).double()
    assert off.std() > 0
    assert abs(off.mean()) < 4 * off.std() / 200**0.5


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_kernels_of_sketches_give_the_bits_of_plain_operators(dtype, turned):
    for rows, features, k in ((24, 5, 7), (23, 512, 23), (1, 3, 1), (300, 768, 37), (65, 300, 40)):
        x = torch.randn(rows, features, device="cuda", dtype=torch.float64).to(dtype)
        x = x.t().contiguous().t() if turned else x
        real, seed = torch.rand(rows, device="cuda") < 0.7, draw_seed(x)
        order = real.logical_not().argsort(stable=True)
        for mask in ((None, None), (order, real)):
            assert torch.equal(strided._deal_at_once(x, seed, k, *mask), strided._deal(x, seed, k, *mask))
        for bits in (8, 4):
            given = x, seed, bits, 256 if features % 256 == 0 else features
            kept, plain = rounded._round_off_at_once(*given), rounded._round_off(*given)
            assert all(map(torch.equal, kept, plain))
            made, known = (widen(*kept, bits, dtype) for widen in (rounded._widen_at_once, rounded._widen))
            torch.testing.assert_close(made, known)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_rounded_inputs_take_less_at_the_peak(kind, dtype):
    x = torch.randn(32768, 2048, device="cuda", dtype=dtype)
    model = Chain(12).to(device="cuda", dtype=dtype)

    def step():
        model(x).backward()
        model.zero_grad()

    step()
    exact = lowtide.measure(step, device="cuda")
    lowtide.sketch(model, kind=kind)
    step()
    found = lowtide.measure(step, device="cuda")
    share = {"int8": 1, "int4": 0.5}[kind] / dtype.itemsize
    print(kind, dtype, exact, found)
    assert exact.peak - found.peak > 0.5 * (1 - share) * 11 * x.numel() * dtype.itemsize
