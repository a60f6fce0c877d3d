"""Plans for a device that is not here, and for tensors that are nowhere: no activation is allocated."""

import copy
import resource

import pytest
import torch

import lowtide
from lowtide.devices.table import find_device
from vision import images
from vision import resnet as network
from zoo import ZOO

pytestmark = pytest.mark.slow

GIB = 2**30


@pytest.fixture(scope="module")
def resnet():
    """The stages of ResNet-50 with a block each, and as many images as make its bytes."""
    return network((1, 1, 1, 1)), images(200, "cpu")


def most_memory():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.parametrize(("device", "label"), [("H200", "H200"), (None, "cpu")])
def test_large_step_is_planned_without_its_memory(resnet, device, label):
    model, batch = resnet
    before = most_memory()
    plan = lowtide.plan(model, *batch, device=device)
    assert plan.graph.device == label
    assert 7 * GIB < plan.allocated < 8 * GIB
    assert most_memory() - before < plan.peak / 8


def test_share_of_an_absent_device_is_of_its_memory():
    model, args, kwargs = ZOO["mlp"].make()
    plan = lowtide.plan(model, *args, kwargs=kwargs, device="H200", budget="50% of device")
    assert plan.budget == find_device("H200").memory // 2
    assert plan.method == "keep_all"
    with pytest.raises(lowtide.BudgetError, match="more than the device"):
        lowtide.plan(model, *args, kwargs=kwargs, device="H200", budget="150% of device")


def test_share_on_the_cpu_is_of_the_uncapped_peak():
    model, args, kwargs = ZOO["mlp"].make()
    plan = lowtide.plan(model, *args, kwargs=kwargs, budget="80%")
    assert plan.budget == int(0.8 * plan.uncapped.peak)
    assert plan.peak <= plan.budget


def to_meta(tree):
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), tree)


@pytest.mark.parametrize(("name", "device"), [("mlp_dropout", None), ("resnet", "H200")])
def test_model_on_the_meta_device_is_planned_as_on_the_cpu(name, device):
    model, args, kwargs = ZOO[name].make()
    expected = lowtide.plan(model, *args, kwargs=kwargs, device=device)
    meta = copy.deepcopy(model).to("meta")
    named = dict(meta.state_dict(keep_vars=True))
    found = lowtide.plan(meta, *to_meta(args), kwargs=to_meta(kwargs), device=device)
    assert found == expected
    assert all(tensor is named[key] for key, tensor in meta.state_dict(keep_vars=True).items())
    assert all(tensor.is_meta for tensor in named.values())


def test_model_on_the_meta_device_with_a_real_batch():
    model, args, kwargs = ZOO["mlp"].make()
    expected = lowtide.plan(model, *args, kwargs=kwargs)
    assert lowtide.plan(model.to("meta"), *args, kwargs=kwargs) == expected


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(30, 20), torch.nn.Linear(20, 30, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.embed(x)).exp().sum()


def test_tied_weights_stay_tied_on_the_meta_device():
    x = torch.zeros(10, dtype=torch.long)
    with torch.device("meta"):
        meta = Tied()
    assert lowtide.plan(meta, to_meta(x)) == lowtide.plan(Tied(), x)
    assert meta.head.weight is meta.embed.weight


def test_function_over_meta_tensors_is_refused():
    meta, x = torch.nn.Linear(4, 4, device="meta"), torch.empty(2, 4, device="meta")
    with pytest.raises(lowtide.CaptureError, match="meta device"):
        lowtide.plan(lambda x: meta(x), x)
    with pytest.raises(lowtide.CaptureError, match="meta device"):
        lowtide.cap(meta, "1GiB")(x)
