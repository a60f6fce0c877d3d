"""The verbs on a user's own function: planned, reported, verified, and told of when it fails."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import lowtide
from lowtide.cli.main import main
from lowtide.cli.verbs import verify_verb as verify_verb
from lowtide.plans.planned_step import Plan

Shell = Callable[..., tuple[int, str, str]]

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(32, 32), nn.Tanh())))

    def forward(self, x):
        return self.layers(x).pow(2).mean()

def needs(batch_size):
    return Net(), torch.ones(batch_size, 32)

def make_step(batch_size=256):
    print("making the step")
    return needs(batch_size)

def without():
    return needs(256)

def on_meta():
    with torch.device("meta"):
        return needs(256)

def build(width):
    return nn.Linear(width, 1 / 0)

def raises():
    return build(3), torch.ones(3)
"""


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    """Runs the command in a folder with net.py; gives status, standard output and standard error."""
    (tmp_path / "net.py").write_text(MODEL, encoding="utf-8")
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> tuple[int, str, str]:
        status = main(list(words))
        out, err = capsys.readouterr()
        return status, out, err.replace("making the step\n", "")

    return run


def planned(answer: tuple[int, str, str]) -> Plan:
    status, out, err = answer
    assert (status, err) == (0, "")
    return Plan.from_json(out)


@pytest.mark.slow
def test_a_step_is_planned_as_its_graph_file_is(shell: Shell) -> None:
    step = planned(shell("plan", "net.py:make_step", "--budget", "60%", "--json"))
    assert shell("capture", "net.py:make_step", "-o", "g.json")[0] == 0
    assert planned(shell("plan", "g.json", "--budget", "60%", "--json")).schedule == step.schedule
    assert step.budget is not None
    assert step.peak <= step.budget == int(0.6 * step.uncapped.peak)
    assert step.notes == ()
    assert step.bound is not None


@pytest.mark.slow
def test_a_step_is_planned_for_a_device_and_its_allocator(shell: Shell) -> None:
    words = ("plan", "net.py:make_step", "--batch-size", "65536", "--device", "A100", "--json", "--budget")
    vanilla, plan = planned(shell(*words, "100%")), planned(shell(*words, "70%"))
    assert vanilla.graph.device == plan.graph.device == "A100"
    assert vanilla.is_plain
    assert plan.peak <= int(0.7 * vanilla.allocated)
    status, _, err = shell(*words, "100GiB")
    assert (status, "more than the device A100 has (79.00 GiB)" in err) == (2, True)


@pytest.mark.slow
def test_a_step_takes_a_batch_size_an_optimizer_and_an_executor(shell: Shell) -> None:
    words = ("plan", "net.py:make_step", "--budget", "100%", "--json", "--batch-size", "16")
    small = planned(shell(*words)).graph
    assert sum(value.bytes for value in small.values if value.kind == "input") == 16 * 32 * 4
    counted = planned(shell(*words, "--optimizer", "AdamW")).graph
    parameters = sum(value.bytes for value in small.values if value.kind == "parameter")
    assert counted.fixed["optimizer"] > 2 * parameters
    assert len(planned(shell(*words, "--executor", "inductor")).graph.ops) < len(small.ops)


@pytest.mark.slow
@pytest.mark.parametrize("verb", [("compare", "--methods", "auto,keep_all"), ("frontier", "--points", "3")])
def test_other_verbs_take_a_step(shell: Shell, verb: tuple[str, ...]) -> None:
    first, *rest = verb
    status, out, err = shell(first, "net.py:make_step", *rest, "--device", "H200")
    assert (status, err) == (0, "")
    assert "H200" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("net.py",), "net.py is a file: name its function, as in net.py:make_step"),
        (("net.py:",), "net.py is a file: name its function, as in net.py:make_step"),
        (("net.py:needs",), "needs() needs an argument: give it a default, as in def needs(batch_size=8)"),
        (("net.py:without", "--batch-size", "3"), "without() takes no batch size. Let it take one"),
        (
            ("net.py:make_step", "--optimizer", "Magic"),
            "optimizer 'Magic' is not in torch.optim; choose one of",
        ),
        (("net.py:make_step", "--optimizer", "LBFGS"), "state of LBFGS"),
        (
            ("g.json", "--device", "H200"),
            "--device is for a step, as in model.py:make_step; the graph in g.json",
        ),
        (("g.json", "--batch-size", "2"), "--batch-size is for a step"),
        (("nothing.py:make_step",), "there is no file 'nothing.py', seen from "),
    ],
)
def test_what_a_step_cannot_be(shell: Shell, words: tuple[str, ...], said: str) -> None:
    status, out, err = shell("plan", *words, "--budget", "50%")
    assert (status, out) == (2, "")
    assert said in err


def test_an_error_of_the_script_shows_its_own_lines(shell: Shell) -> None:
    status, _, err = shell("plan", "net.py:raises", "--budget", "50%")
    assert status == 2
    first, *lines = err.splitlines()
    assert first == (
        "lowtide: error: raises() raised an error: ZeroDivisionError: division by zero (net.py:28)"
    )
    assert lines == [
        "  net.py:31, in raises",
        "    return build(3), torch.ones(3)",
        "  net.py:28, in build",
        "    return nn.Linear(width, 1 / 0)",
    ]


# report


@pytest.mark.slow
def test_a_report_of_a_plan_file_a_graph_file_and_a_step(shell: Shell) -> None:
    shell("capture", "net.py:make_step", "-o", "g.json")
    shell("plan", "g.json", "--budget", "60%", "-o", "p.json")
    for words in (["p.json"], ["g.json"], ["g.json", "--budget", "60%"], ["net.py:make_step"]):
        status, out, err = shell("report", *words, "-o", "out.html")
        assert (status, err) == (0, "")
        assert out.startswith("report: out.html (")
        assert Path("out.html").read_text(encoding="utf-8").lower().startswith("<!doctype html>")
    assert shell("report", "p.json", "-o", "-")[1] == Path(Plan.load("p.json").report("p.html")).read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("absent.json", "-o", "o.html"), "cannot read absent.json: No such file"),
        (("a" * 5000, "-o", "o.html"), "File name too long"),
        (("nul\0.json", "-o", "o.html"), "embedded null byte"),
        (("net.py:make_step", "-o", "."), "cannot write .: it is a folder"),
        (("net.py:make_step", "-o", "o.html", "--method", "chain"), "--method chain needs a --budget"),
        (("f.json", "-o", "o.html"), "f.json: field \"lowtide\": expected 'plan', found 'frontier'"),
    ],
)
def test_report_refuses(shell: Shell, words: tuple[str, ...], said: str) -> None:
    Path("f.json").write_text('{"lowtide": "frontier"}', encoding="utf-8")
    status, out, err = shell("report", *words)
    assert (status, out) == (2, "")
    assert said in err
    assert not Path("o.html").exists()


# verify


def test_verify_holds(shell: Shell) -> None:
    status, out, err = shell("verify", "net.py:make_step", "--budget", "60%")
    assert (status, err) == (0, "")
    assert out.startswith("verified: yes")
    assert "as predicted" in out


@pytest.mark.slow
def test_verify_as_json(shell: Shell) -> None:
    words = ("verify", "net.py:make_step", "--budget", "min", "--batch-size", "64", "--json")
    found = json.loads(shell(*words)[1])
    assert found["ok"] is True
    assert found["measured"] == found["predicted"] == found["capped"]["peak"]
    assert found["compared"]["gradients"] == 8


@pytest.mark.slow
def test_what_does_not_hold_is_status_one(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    def different(*args: Any, **options: Any) -> lowtide.Verification:
        names = ("gradients layers.0.weight",)
        return replace(lowtide.verify(*args, **options), different=names, far=names)

    monkeypatch.setattr(verify_verb, "verify", different)
    status, out, _ = shell("verify", "net.py:make_step", "--budget", "min")
    assert status == 1
    assert out.startswith("verified: NO")
    assert "differs: gradients layers.0.weight" in out


@pytest.mark.slow
def test_a_budget_that_verify_cannot_meet_is_status_one(shell: Shell) -> None:
    status, out, err = shell("verify", "net.py:make_step", "--budget", "1KiB")
    assert (status, out) == (1, "")
    assert "is below the smallest feasible peak" in err


def test_verify_needs_a_model_that_runs(shell: Shell) -> None:
    status, _, err = shell("verify", "net.py:on_meta", "--budget", "50%")
    assert status == 2
    assert "its model is on the meta device" in err
    assert shell("plan", "net.py:on_meta", "--budget", "100%")[0] == 0


@pytest.fixture(autouse=True)
def same_random_state() -> Iterator[None]:
    import torch

    with torch.random.fork_rng(devices=[]):
        yield
