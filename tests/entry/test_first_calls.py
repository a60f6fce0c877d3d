"""Steps whose first call is not like the next: what `cap` does with them is what `verify` says."""

import copy
import importlib
import threading

import pytest
import torch
from torch import nn

import lowtide

pytestmark = pytest.mark.slow

verify_module = importlib.import_module("lowtide.evidence.verification")

LOCK = threading.Lock()


class Net(nn.Module):
    """A step that does something at its first call, or at every one, before it computes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Dropout(0.3), nn.Tanh(), nn.Linear(32, 1)
        )
        self.ready, self.calls = False, 0

    def forward(self, x):
        self.calls += 1
        return self.net(self.prepare(x)).pow(2).mean()


class Hooks(Net):
    """As the models of transformers that record outputs."""

    def prepare(self, x):
        if not self.ready:
            with LOCK:
                self.net[0].register_forward_hook(lambda module, args, output: output * 1.5)
                self.ready = True
        return x


class Table(Net):
    def prepare(self, x):
        if not hasattr(self, "table"):
            with LOCK:
                self.table = torch.arange(32.0)
        return x + self.table


class TableByShape(Net):
    def __init__(self):
        super().__init__()
        self.tables = {}

    def prepare(self, x):
        if x.shape not in self.tables:
            with LOCK:
                self.tables[x.shape] = torch.ones(x.shape[-1])
        return x * self.tables[x.shape]


class LazyBuffer(Net):
    def prepare(self, x):
        if "mask" not in self._buffers:
            with LOCK:
                self.register_buffer("mask", torch.ones(32))
        return x * self.mask


class KeepsItsInput(Net):
    def prepare(self, x):
        if not self.ready:
            with LOCK:
                self.ready = True
        self.last, self.seen = x.detach(), [*getattr(self, "seen", []), self.calls]
        return x


class Flag(Net):
    """Captured at the first try, and once more for the second call."""

    def prepare(self, x):
        first, self.ready = not self.ready, True
        return x * 2 if first else x


def three_steps(model, x):
    torch.manual_seed(7)
    found = []
    for _ in range(3):
        model.zero_grad()
        loss = model(x)
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
        found += [*(b.clone() for b in model.buffers()), torch.get_rng_state()]
    return found


@pytest.mark.parametrize("kind", [Hooks, Table, TableByShape, LazyBuffer, KeepsItsInput, Flag])
def test_what_a_first_call_installs(kind, caplog_lowtide):
    plain, x = kind(), torch.randn(64, 32)
    expected = three_steps(plain, x)
    model = lowtide.cap(kind(), "min")
    found = three_steps(model, x)
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))
    assert model.calls == plain.calls
    assert len(model.net[0]._forward_hooks) == len(plain.net[0]._forward_hooks)
    assert lowtide.plan_of(model).method != "keep_all"
    said = [line for line in caplog_lowtide if "second try" in line]
    assert len(said) == (0 if kind is Flag else 1)
    assert all(f"the first call of {kind.__name__} " in line for line in said)


class WritesParameters(Net):
    """Data-dependent initialisation, as ActNorm's."""

    def prepare(self, x):
        if not self.ready:
            with LOCK:
                self.net[0].bias.data.copy_(-x.mean(0))
                self.ready = True
        return x


class OtherResult(Net):
    def prepare(self, x):
        if not self.ready:
            with LOCK:
                self.ready = True
            return x * 2
        return x


class OtherNumbers(Net):
    def prepare(self, x):
        if not self.ready:
            with LOCK:
                self.table, self.ready = torch.randn(32), True
        return x + self.table


class CountsIn(Net):
    def prepare(self, x):
        if not self.ready:
            with LOCK:
                self.ready = True
        return x * float(self.calls)


class KeepsAGraph(Net):
    def prepare(self, x):
        if not hasattr(self, "table"):
            with LOCK:
                self.table = self.net[0].weight.sum(0)
        return x + self.table


class DataDependent(Net):
    def prepare(self, x):
        return x + 1 if x.sum() > 0 else x


REFUSED = [WritesParameters, OtherResult, OtherNumbers, CountsIn, KeepsAGraph, DataDependent]


@pytest.mark.parametrize("kind", REFUSED)
def test_first_call_for_which_no_later_one_may_stand_is_refused(kind):
    model, x = kind(), torch.randn(64, 32)
    before, attributes = copy.deepcopy(model.state_dict()), {*vars(model)}
    lowtide.cap(model, "1MiB")
    torch.manual_seed(7)
    with pytest.raises(lowtide.GraphBreak, match=r"test_first_calls\.py:\d+"):
        model(x)
    assert torch.equal(torch.get_rng_state(), torch.manual_seed(7).get_state())
    after = model.state_dict()
    assert {*after} == {*before}
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert {*vars(lowtide.uncap(model))} == {*attributes, "_compiled_call_impl"}
    assert (model.ready, model.calls) == (False, 0)
    with pytest.raises(lowtide.GraphBreak):
        lowtide.verify(model, x, budget="1MiB")


def test_plain_runs_keep_nothing_for_a_backward():
    """The run that lets a first call install things must not need the memory that the cap is there for."""
    model = Hooks()
    model.net = nn.Sequential(*(part for _ in range(20) for part in (nn.Linear(64, 64), nn.GELU())))
    x = torch.randn(2048, 64)
    lowtide.cap(model, "min")
    taken = lowtide.measure(lambda: model(x).backward())
    assert taken.peak <= lowtide.plan_of(model).peak + 64


def test_iterators_are_not_used_up():
    net = nn.Linear(4, 4)

    def step(batches):
        with LOCK:
            return net(next(batches)).sum()

    batches = iter([torch.ones(2, 4)])
    with pytest.raises(lowtide.GraphBreak):
        lowtide.cap(step, "1MiB")(batches)
    assert len(list(batches)) == 1


def test_plan_runs_nothing_and_says_what_to_do():
    model, x = Hooks(), torch.randn(64, 32)
    with pytest.raises(lowtide.GraphBreak) as caught:
        lowtide.plan(model, x)
    assert any("once before" in note for note in caught.value.__notes__)
    assert not model.ready
    with torch.no_grad():
        model(x)
    assert lowtide.plan(model, x).peak > 0


def test_verify_runs_the_capped_step_first(monkeypatch):
    """A model that can be captured only after a plain run is one that `cap` refuses, and so does `verify`."""
    monkeypatch.setattr("lowtide.entry.capped.may_install", lambda *_: False)
    model, x = Hooks(), torch.randn(64, 32)
    with pytest.raises(lowtide.GraphBreak):
        lowtide.verify(model, x, budget="min")
    assert not model.ready


def test_verify_leaves_what_a_first_call_installs_to_the_first_call():
    model, x = Hooks(), torch.randn(64, 32)
    found = lowtide.verify(model, x, budget="min")
    assert found.ok, found
    assert (model.ready, model.calls, len(model.net[0]._forward_hooks)) == (False, 0, 0)


@pytest.mark.parametrize("step", [0, 1])
def test_verify_compares_the_first_step_and_the_second(monkeypatch, step):
    run_capped = verify_module._run_capped

    def wrong(*args):
        steps, taken, plan = run_capped(*args)
        steps[step]["gradients net.0.weight"] += 1
        return steps, taken, plan

    monkeypatch.setattr(verify_module, "_run_capped", wrong)
    found = lowtide.verify(Net2(), torch.randn(64, 32), budget="min")
    assert not found.ok
    assert found.different == ("gradients net.0.weight",)
    assert found.only_first == (found.different if step == 0 else ())
    assert ("in the first step, which plans, alone" in str(found)) == (step == 0)


class Net2(Net):
    def prepare(self, x):
        return x


def test_lazy_parameters_are_refused_before_anything_is_drawn():
    """A capture would draw them, and leave the random state as it was: other masks than eager's."""
    model, x = nn.Sequential(nn.LazyLinear(32), nn.Dropout(), nn.LazyLinear(1)), torch.randn(8, 16)
    state = torch.get_rng_state()
    lowtide.cap(model, "1MiB")
    for call in (lambda: model(x), lambda: lowtide.plan(model, x)):
        with pytest.raises(lowtide.CaptureError, match=r"'0' \(LazyLinear\).*once before"):
            call()
    with pytest.raises(lowtide.CaptureError, match="LazyLinear"):
        lowtide.verify(lowtide.uncap(model), x, budget="1MiB")
    assert torch.equal(torch.get_rng_state(), state)
    with torch.no_grad():
        model(x)
    assert lowtide.verify(model, x, budget="min").ok


def segformer():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.SegformerConfig(
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[16, 32],
        patch_sizes=[7, 3],
        strides=[4, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=32,
        num_labels=5,
    )
    return transformers.SegformerForSemanticSegmentation(config).train()


def test_segformer_records_outputs():
    batch = {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.randint(5, (2, 32, 32))}
    plain, model = segformer(), lowtide.cap(segformer(), "80%")
    for _ in range(2):
        results = []
        for each in (plain, model):
            torch.manual_seed(1)
            loss = each(**batch).loss
            loss.backward()
            results.append([loss, *(p.grad for p in each.parameters()), *each.buffers()])
        assert all(map(torch.equal, *results))
    found = lowtide.verify(segformer(), kwargs=batch, budget="80%")
    assert found.ok, found
