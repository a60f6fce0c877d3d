"""On a GPU, training loops as they are written: autocast, scalers, wrapped optimizers, two forwards."""

import copy
import os

import pytest

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # asked for by deterministic algorithms
import torch
from torch import nn
from torch.nn import functional

import lowtide
from small_models import autocast_gradients as gradients
from small_models import same

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a CUDA device; run on a machine with one"
    ),
    pytest.mark.filterwarnings("ignore:.*does not have a deterministic implementation"),
    pytest.mark.filterwarnings("ignore:(Memory Efficient|cuDNN) [aA]ttention defaults"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores for float32 matrix multiplication"),
]

WIDTH = 256
MIB = 2**20


@pytest.fixture(autouse=True)
def repeatable():
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


class Block(nn.Module):
    """Attention in its math form (its bias trains), a layer that is read twice, a bilinear one."""

    def __init__(self, *, dropout=0.1):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.randn(64, 64))
        self.norm, self.bilinear = nn.LayerNorm(WIDTH), nn.Bilinear(32, 32, 32)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (8, 32)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=self.bias)
        y = self.dropout(self.out(y.transpose(1, 2).flatten(2)))
        y = self.out(functional.gelu(self.norm(x + y)))
        part = self.bilinear(y[..., :32], y[..., 32:64])
        return torch.cat([part, y[..., 32:]], -1)


class Model(nn.Module):
    def __init__(self, layers=4):
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(layers)))

    def forward(self, x):
        return self.blocks(x).float().square().mean()


@pytest.fixture
def model():
    return Model().cuda()


@pytest.fixture
def x():
    return torch.randn(16, 64, WIDTH, device="cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("inside", [False, True])
def test_autocast_as_loops_use_it_is_eagers(model, x, dtype, inside):
    twin = copy.deepcopy(model)
    expected = gradients(twin, x, dtype, inside=inside)
    assert same(gradients(twin, x, dtype, inside=inside), expected), "eager itself is not repeatable here"
    lowtide.cap(model, "min")
    if inside:
        gradients(model, x, dtype, inside=inside)  # captured for a backward outside, and says so
    assert same(gradients(model, x, dtype, inside=inside), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_verify_under_autocast(model, x, dtype):
    with torch.autocast("cuda", dtype):
        found = lowtide.verify(model, x, budget="min")
    assert found.equal, found
    assert abs(found.measured - found.predicted) <= max(0.01 * found.predicted, 2 * MIB), found


def test_the_inductor_executor_under_autocast(model, x):
    twin = copy.deepcopy(model)
    lowtide.cap(model, "min", executor="inductor")
    lowtide.cap(twin, "free", executor="inductor", method="keep_all")
    for mine, other in zip(
        gradients(model, x, torch.bfloat16), gradients(twin, x, torch.bfloat16), strict=True
    ):
        assert (mine - other).norm() <= 0.02 * other.norm() + 1e-6


@pytest.mark.parametrize("executor", ["eager", "inductor"])
def test_a_loop_with_a_scaler_trains_as_without_a_cap(model, x, executor):
    ends = []
    for one in (copy.deepcopy(model), model):
        if one is model:
            lowtide.cap(one, "min", executor=executor)
        torch.manual_seed(1)
        optimizer = torch.optim.AdamW(one.parameters(), lr=1e-4)
        scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
        losses = []
        for _ in range(4):
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.float16):
                loss = one(x)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(one.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.detach())
        ends.append([*losses, *(p.detach().clone() for p in one.parameters())])
    if executor == "eager":
        assert same(*ends)
    else:  # its dropout is Inductor's own
        assert abs(ends[0][3] - ends[1][3]) < 0.1 * abs(ends[0][0])


class Wrapped:
    """An optimizer in a wrapper that hands everything on, as training tools have them."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def __getattr__(self, name):
        return getattr(self.__dict__["optimizer"], name)

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups):
        self.optimizer.param_groups = groups

    @property
    def state(self):
        return self.optimizer.state

    @state.setter
    def state(self, state):
        self.optimizer.state = state


def step_peak(model, optimizer, x):
    torch.cuda.reset_peak_memory_stats()
    model(x).backward()
    peak = torch.cuda.max_memory_allocated()
    optimizer.step()
    optimizer.zero_grad()
    return peak


def budget_between(model, x, *, share):
    """A share of the way from what is there before the step to its uncapped peak."""
    torch.cuda.empty_cache()
    base = torch.cuda.memory_allocated()
    peak = lowtide.measure(lambda: model(x).backward(), device="cuda").peak
    model.zero_grad()
    return base + int(share * (peak - base))


@pytest.mark.parametrize("announced", [True, False])
def test_a_wrapped_optimizer_is_left_as_it_is_and_its_state_counts(model, x, announced):
    state = 2 * sum(p.numel() * p.element_size() for p in model.parameters())
    budget = budget_between(model, x, share=0.7) + state
    optimizer = Wrapped(torch.optim.Adam(model.parameters(), lr=1e-3))
    before = [p.detach().clone() for p in model.parameters()]
    lowtide.cap(model, budget, **({"optimizer": optimizer} if announced else {}))
    peaks = [step_peak(model, optimizer, x) for _ in range(4)]
    assert all(peak <= budget for peak in peaks), (peaks, budget)
    assert len(optimizer.optimizer.param_groups[0]["params"]) == len(before)
    assert not any(map(torch.equal, before, model.parameters()))


def test_state_that_was_not_announced_is_planned_for_when_it_is_there(model, x, caplog_lowtide):
    budget = budget_between(model, x, share=0.7)
    optimizer = torch.optim.Adam(model.parameters())
    lowtide.cap(model, budget)
    peaks = [step_peak(model, optimizer, x) for _ in range(4)]
    assert all(peak <= budget for peak in peaks), (peaks, budget)
    assert any("optimizer" in text for text in caplog_lowtide)


@pytest.mark.parametrize("executor", ["eager", "inductor"])
def test_two_forwards_stay_under_the_budget_or_are_refused(model, x, executor):
    lowtide.cap(model, "free", executor=executor)
    model(x).backward()
    model.zero_grad()
    alone = lowtide.plan_of(model).peak
    lowtide.cap(model, alone + 2 * MIB, executor=executor)
    first = model(x)
    with pytest.raises(lowtide.UnsupportedBackward, match="one function"):
        model(x)
    first.backward()
    model.zero_grad()
    lowtide.uncap(model)
    roomy = budget_between(model, x, share=2.6)
    lowtide.cap(model, roomy, executor=executor)
    (model(x) + model(x)).backward()  # captured, and compiled
    for _ in range(2):
        model.zero_grad()
        taken = lowtide.measure(lambda: (model(x) + model(x)).backward(), device="cuda")
        assert taken.peak <= roomy
