"""The demonstration: it holds what it promises, says so line by line, and leaves its report."""

import pytest
import torch

from lowtide.cli import demo
from lowtide.cli.main import main

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def same_number_of_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def small(monkeypatch):
    """The same transformer with fewer layers and shorter texts."""
    for name, value in {"CONTEXT": 32, "BATCH": 8, "WIDTH": 64, "LAYERS": 4}.items():
        monkeypatch.setattr(demo, name, value)


def test_demo_holds_and_says_so(small, tmp_path, capsys):
    assert main(["demo", "--steps", "2", "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    for line in (
        "peak uncapped ",
        "cap  ",
        "(40% of the activation peak)",
        "predicted peak ",
        "measured peak ",
        "extra time ",
        "gradients identical: yes",
        "losses identical:    yes",
        f"report:              {tmp_path / 'out' / 'report.html'}",
    ):
        assert line in said
    assert (tmp_path / "out" / "report.html").read_text().lower().startswith("<!doctype html>")


def test_demo_takes_a_share(small, tmp_path, capsys):
    assert main(["demo", "--steps", "1", "--share", "0.7", "--out", str(tmp_path)]) == 0
    assert "(70% of the activation peak)" in capsys.readouterr().out
