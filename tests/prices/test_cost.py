"""Prices: measured once and remembered, harmless to everything around them, or taken from a table."""

import json
import os
from unittest import mock

import pytest
import torch
from torch import nn

import lowtide
from lowtide.devices.table import DEVICES, find_device
from lowtide.files.cache_folder import cache_folder
from lowtide.pipeline import way_down
from lowtide.prices import measured as cost
from lowtide.prices import price_cache as pricelist
from lowtide.prices.price_cache import PriceList
from lowtide.prices.pricing import price


@pytest.fixture
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("LOWTIDE_CACHE", str(folder))
    return folder


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.BatchNorm1d(16), nn.Linear(16, 1))


@pytest.fixture
def x():
    return torch.randn(8, 16)


def measured(model, x):
    return lowtide.plan(model, x, prices="measured").graph


def ops_that_run(model, x):
    """How many ops are tried on the device while a plan is made."""
    with mock.patch.object(cost, "_try_op", wraps=cost._try_op) as tried:
        measured(model, x)
    return tried.call_count


def prices_file(cache):
    (path,) = (cache / "prices").iterdir()
    return path


def test_every_op_gets_a_price(cache, model, x):
    graph = measured(model, x)
    assert all(op.seconds > 0 for op in graph.ops)
    assert graph.prices == "measured on cpu"


@pytest.mark.slow
def test_measuring_touches_nothing(cache, model, x):
    state, random = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    with torch.no_grad():
        measured(model, x)
        assert not torch.is_grad_enabled()
    with torch.autocast("cpu", torch.bfloat16, enabled=False):
        measured(model, x)
        assert torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_files_only_in_the_cache(cache, model, x, tmp_path, monkeypatch):
    for name in ("HOME", "XDG_CACHE_HOME"):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(name, str(tmp_path / name))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    measured(model, x)
    files = [path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()]
    assert files == [prices_file(cache).relative_to(tmp_path)]


def test_folder_of_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("LOWTIDE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "lowtide"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "lowtide"


def test_roofline_writes_no_file(cache, model, x):
    lowtide.plan(model, x)
    assert not cache.exists()


def test_prices_are_reused(cache, model, x):
    first = measured(model, x)
    written = prices_file(cache).read_bytes()
    assert ops_that_run(model, x) == 0
    assert measured(model, x) == first
    assert prices_file(cache).read_bytes() == written


def test_same_call_is_measured_once(cache, x):
    twins = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))
    graph = measured(twins, x)
    assert len(graph.ops) > 15
    assert len(PriceList.load(torch.device("cpu")).prices) < 7


def test_other_shapes_are_measured_anew(cache, model, x):
    measured(model, x)
    assert ops_that_run(model, x[:4]) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '{"prices": 3}',
        '{"prices": {"op": [1]}}',
        '{"prices": {"op": ["1", 2, 3]}}',
    ],
)
def test_broken_file_is_ignored_and_rewritten(cache, model, x, content):
    measured(model, x)
    good = json.loads(prices_file(cache).read_text())
    prices_file(cache).write_text(content)
    assert ops_that_run(model, x) == len(good["prices"])
    again = json.loads(prices_file(cache).read_text())
    assert again["prices"].keys() == good["prices"].keys()


@pytest.mark.slow
def test_binary_rubbish_is_ignored(cache, model, x):
    measured(model, x)
    prices_file(cache).write_bytes(b"\xff\x00\xfe")
    assert ops_that_run(model, x) > 0


def test_folder_that_cannot_be_written_to_is_harmless(tmp_path, monkeypatch, model, x):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path / "file" / "cache"))
    assert measured(model, x).prices == "measured on cpu"
    assert os.listdir(tmp_path) == ["file"]


def test_op_that_does_not_run_alone_is_priced_by_the_roofline(cache, model, x):
    real = cost._made_up_tensor

    def refuse(fake):
        if fake.dim() == 2 and fake.shape[1] == 1:
            raise RuntimeError("not with these inputs")
        return real(fake)

    with mock.patch.object(cost, "_made_up_tensor", refuse):
        graph = measured(model, x)
    assert "ops by roofline" in graph.prices
    assert all(op.seconds > 0 for op in graph.ops)
    assert "ops by roofline" in measured(model, x).prices


@pytest.mark.slow
def test_op_that_had_no_memory_to_run_in_is_measured_the_next_time(cache, model, x):
    def refuse(fake):
        raise torch.OutOfMemoryError("none left")

    with mock.patch.object(cost, "_made_up_tensor", refuse):
        graph = measured(model, x)
    assert "ops by roofline" in graph.prices
    assert measured(model, x).prices == "measured on cpu"


def test_other_kernels_have_other_prices(monkeypatch):
    monkeypatch.setattr(pricelist, "describe", lambda device: "NVIDIA H200")
    plain = f"NVIDIA-H200-torch{torch.__version__}".replace("+", "-")
    assert pricelist._name(torch.device("cuda")) == plain
    with torch.backends.cudnn.flags(benchmark=True, deterministic=True):
        assert pricelist._name(torch.device("cuda")) == f"{plain}-benchmark-deterministic"


def test_measured_bytes_are_the_real_ones(cache, model, x):
    here = {value.name: value.bytes for value in measured(model, x).values}
    assert here == {value.name: value.bytes for value in lowtide.plan(model, x).graph.values}


def seconds_of(model, x, target, **options):
    return sum(op.seconds for op in lowtide.plan(model, x, **options).graph.ops if op.target == target)


@pytest.mark.parametrize("device", [None, "H200", "T4"])
def test_roofline_orders_products_by_size(device):
    small, large = nn.Linear(256, 256), nn.Linear(2048, 2048)
    seconds = [
        seconds_of(layer, torch.empty(512, layer.in_features), "aten.addmm.default", device=device)
        for layer in (small, large)
    ]
    assert seconds[0] < seconds[1]


def test_roofline_orders_devices():
    layer, x = nn.Linear(2048, 2048), torch.empty(512, 2048)
    seconds = [
        seconds_of(layer, x, "aten.addmm.default", device=name) for name in ("H200", "A100", "T4", "cpu")
    ]
    assert seconds == sorted(seconds)


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("NVIDIA H200", "H200"),
        ("h200", "H200"),
        ("H200", "H200"),
        ("GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("A100-40GB", "A100-40GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("H100 80GB HBM3", "H100"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L4", "L4"),
        ("Tesla T4", "T4"),
        ("cpu", "cpu"),
    ],
)
def test_device_by_name(asked, found):
    assert find_device(asked).name == found


def test_device_with_less_memory_than_the_one_in_the_table():
    small = find_device("Tesla V100-SXM2-16GB")
    assert (small.name, small.memory) == ("V100-16GB", 15 * 2**30)
    assert find_device(small.name) == small


@pytest.mark.parametrize("asked", ["", "TPU v5", "B300", "4090", "L40", "T400", "cuda"])
def test_unknown_device_lists_the_known_ones(asked):
    with pytest.raises(lowtide.LowtideError) as caught:
        find_device(asked)
    assert repr(asked) in str(caught.value)
    assert all(device.name in str(caught.value) for device in DEVICES.values())


def test_plan_for_an_unknown_device_is_refused(model, x):
    with pytest.raises(lowtide.LowtideError, match="table of devices"):
        lowtide.plan(model, x, device="abacus")


def test_convolutions_are_measured_in_the_layout_that_they_will_have(cache):
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 2))

    def turned(*args, **options):
        return price(*args, **{**options, "channels_last": True})

    with mock.patch.object(way_down, "price", turned):
        graph = measured(model, torch.randn(2, 4, 8, 8))
    known = json.loads(prices_file(cache).read_text())["prices"]
    assert {key.partition("(")[0] for key in known if key.endswith("channels last")} == {
        "aten.convolution.default",
        "aten.convolution_backward.default",
    }
    assert all(op.seconds > 0 for op in graph.ops)
