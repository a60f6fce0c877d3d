"""The benchmark of sequences at a small size: every row is made, once, and says what was measured."""

import contextlib
import io
import json
import sys
import xml.etree.ElementTree as Xml
from unittest import mock

import pytest

import sequences

pytestmark = pytest.mark.slow

SMALL = ["--hidden=8", "--batch=2", "--steps=60", "--repeats=1", "--long=300", "--cell=8,2"]


def run(*arguments, out):
    said, words = io.StringIO(), ["sequences.py", *arguments, "--out", str(out)]
    with mock.patch.object(sys, "argv", words), contextlib.redirect_stdout(said):
        sequences.main()
    return said.getvalue()


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    out = tmp_path_factory.mktemp("sequences") / "rows.jsonl"
    run(*SMALL, out=out)
    return out


@pytest.fixture
def rows(results):
    return [json.loads(line) for line in results.read_text().splitlines()]


def test_every_tool_has_its_rows(rows):
    tools = [row["tool"] for row in rows if row["what"] == "race"]
    assert tools == ["loop", "checkpoint", "nn.LSTM", *["scan"] * 3, *["recurrent"] * 3]
    assert {row["tool"] for row in rows if row["what"] == "strategy"} == {"hidden", "internal", "mixed"}
    assert [row["steps"] for row in rows if row["what"] == "long"] == [300]


def test_runs_are_the_planned_ones_and_those_of_the_theory(rows):
    for row in rows:
        if row["what"] == "strategy":
            assert row["runs"] == row["planned_runs"] == (row["theory"] or row["runs"])


def test_the_measured_peak_is_the_predicted_one(rows):
    for row in rows:
        if row["what"] in ("strategy", "long"):
            assert 0 <= row["held"] - row["predicted"] <= 64, row  # the loss and its gradient


def test_gradients_are_those_of_the_loop(rows):
    for row in rows:
        if row["what"] == "race" and "error" not in row:
            assert row["distance"] < 1e-5
            assert row["tool"] != "scan" or row["distance"] == 0


def test_rows_are_not_made_again_and_tables_and_the_figure_are_made_of_them(results, tmp_path):
    before = results.read_text()
    assert run(*SMALL, out=results) == ""
    assert results.read_text() == before
    table = run("--table", out=results)
    assert table.count("\n| ") >= 9
    assert "hidden 8, batch 2, 60 steps" in table
    figure = tmp_path / "figure.svg"
    run("--plot", "--figure", str(figure), out=results)
    assert Xml.parse(figure).getroot().tag == "{http://www.w3.org/2000/svg}svg"
