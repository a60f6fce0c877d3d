"""A file of prices is data that may be wrong: it is named and left aside, and the cap holds without it."""

import json
import os
import stat
import threading

import pytest
import torch
from torch import nn

import lowtide
from lowtide.prices import price_cache
from lowtide.prices.price_cache import Price, PriceList

CPU = torch.device("cpu")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    price_cache._say_not_believed.cache_clear()
    monkeypatch.setattr(price_cache, "_HELD", {})
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def path(cache):
    """Where the prices of this machine are, with one in it."""
    known = PriceList.load(CPU)
    known["op"] = Price(1e-3, 8, None)
    known.save()
    return known.path


def content(prices, version=2):
    return json.dumps({"lowtide": "prices", "version": version, "prices": prices})


WRONG = {
    "not a number": '{"lowtide": "prices", "version": 2, "prices": {"op": [NaN, 0, null]}}',
    "infinite": '{"lowtide": "prices", "version": 2, "prices": {"op": [1e999, 0, null]}}',
    "negative seconds": content({"op": [-1.0, 0, None]}),
    "seconds for ever": content({"op": [1e308, 0, None]}),
    "an integer too large": content({"op": [10**400, 0, None]}),
    "true": content({"op": [True, 0, None]}),
    "negative bytes": content({"op": [1.0, -1, None]}),
    "bytes for ever": content({"op": [1.0, 1 << 62, None]}),
    "negative output": content({"op": [1.0, 0, [[-4, [1], 0, None, ""]]]}),
    "strides of text": content({"op": [1.0, 0, [[4, "11", 0, None, ""]]]}),
    "another sign": content({"op": [1.0, 0, [[4, [1], 0, None, "\x1b"]]]}),
    "nested": "[" * 100_000,
    "nested prices": content({"op": [1.0, 0, None]})[:-3] + "[" * 100_000,
    "another version": content({"op": [1.0, 0, None]}, version=1),
    "a version that is no number": content({"op": [1.0, 0, None]}, version="2"),
    "twice": '{"lowtide": "prices", "version": 2, "prices": {}, "prices": {}}',
    "a surrogate": content({"\ud800": [1.0]}),
    "a list": "[]",
    "prices that are none": content([1, 2]),
    "cut short": content({"op": [1.0, 0, None]})[:-5],
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_file_that_is_wrong_is_named_and_left_aside(path, caplog_lowtide, wrong):
    path.write_text(WRONG[wrong])
    for _ in range(2):
        known = PriceList.load(CPU)
    assert not known.prices
    (line,) = caplog_lowtide
    assert str(path) in line
    assert line.isprintable()
    known["other"] = Price(2.0, 0, None)
    known.save()
    assert PriceList.load(CPU).prices == {"other": Price(2.0, 0, None)}


def test_a_file_that_is_right_is_read_and_is_private(path, caplog_lowtide):
    assert PriceList.load(CPU)["op"] == Price(1e-3, 8, None)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not caplog_lowtide


def test_a_pipe_is_not_waited_for(path, caplog_lowtide):
    path.unlink()
    os.mkfifo(path)
    reader = threading.Thread(target=PriceList.load, args=[CPU], daemon=True)
    reader.start()
    reader.join(600)
    assert not reader.is_alive()
    assert "it is not a file" in caplog_lowtide[0]


def test_a_link_and_a_file_of_all_are_not_read(path, caplog_lowtide, tmp_path):
    path.chmod(0o666)
    assert not PriceList.load(CPU).prices
    assert "other users may write" in caplog_lowtide[0]
    price_cache._say_not_believed.cache_clear()
    path.chmod(0o600)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert not PriceList.load(CPU).prices
    assert str(path) in caplog_lowtide[1]


def test_a_file_is_read_again_where_it_was_changed_alone(path, monkeypatch):
    read = []
    monkeypatch.setattr(
        price_cache, "_read_file", lambda found: read.append(found) or {"op": Price(2.0, 0, None)}
    )
    known = PriceList.load(CPU)
    known["op"] = known["another"] = Price(3.0, 0, None)
    assert PriceList.load(CPU).prices == {"op": Price(1e-3, 8, None)}
    known.save()
    assert PriceList.load(CPU).prices == known.prices
    assert json.loads(path.read_text())["prices"] == {"op": [3.0, 0, None], "another": [3.0, 0, None]}
    assert not read
    path.write_text(content({"op": [2.0, 0, None]}))
    assert PriceList.load(CPU)["op"] == Price(2.0, 0, None)
    assert read == [path]


def test_a_file_that_is_too_large_is_not_read(path, caplog_lowtide, monkeypatch):
    monkeypatch.setattr(price_cache, "MOST_FILE_BYTES", 10)
    price_cache._HELD.clear()
    assert not PriceList.load(CPU).prices
    assert "more than 10" in caplog_lowtide[0]


def halved(output):
    return [output[0] // 2, *output[1:]]


def flat(output):
    return [output[0] // 2, [0] * len(output[1]), *output[2:]]


def huge(output):
    return [output[0] << 20, *output[1:]]


@pytest.mark.parametrize(
    "change", [halved, *(pytest.param(each, marks=pytest.mark.slow) for each in (flat, huge))]
)
def test_a_file_cannot_change_what_is_known_of_a_tensor(cache, caplog_lowtide, change):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))
    x = torch.ones(256, 16)
    real = lowtide.plan(model, x, prices="measured")
    (path,) = (cache / "prices").iterdir()
    data = json.loads(path.read_text())
    for price in data["prices"].values():
        price[2] = price[2] and [output and change(output) for output in price[2]]
    path.write_text(json.dumps(data))
    found = lowtide.plan(model, x, prices="measured")
    assert [value.bytes for value in found.graph.values] == [value.bytes for value in real.graph.values]
    assert [op.workspace for op in found.graph.ops] == [op.workspace for op in real.graph.ops]
    (line,) = caplog_lowtide
    assert str(path) in line
    assert set(json.loads(path.read_text())["prices"]) == set(data["prices"])
