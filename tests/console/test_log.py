"""What Lowtide says goes through `logging`: visible by default, left to an application that has handlers."""

import importlib
import io
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

import lowtide
from graphs import chain
from lowtide.console import log as console
from lowtide.plans.keep_all import keep_all
from lowtide.plans.planned_step import make_plan

LOG = logging.getLogger("lowtide")
LINE = "nothing to do: the uncapped peak 7 B fits the budget none"


def say():
    """Say the line of a plan that keeps everything."""
    graph = chain(4)
    console.say_plan(make_plan(graph, keep_all(graph), method="keep_all"))


@pytest.fixture
def handler():
    """A handler of an application's own, on no logger yet, that writes to a string."""
    made = logging.StreamHandler(io.StringIO())
    made.setFormatter(logging.Formatter("%(name)s says: %(message)s"))
    yield made
    for logger in (LOG, logging.getLogger()):
        logger.removeHandler(made)


@pytest.fixture
def level():
    """The level of the logger, put back afterwards."""
    before = LOG.level
    yield before
    LOG.setLevel(before)


def test_a_plan_is_said_on_standard_error(capsys):
    say()
    assert capsys.readouterr().err == f"lowtide: {LINE}\n"


@pytest.mark.parametrize("name", ["lowtide", None], ids=["lowtide", "root"])
def test_an_application_with_a_handler_gets_it_and_nothing_is_printed(handler, name, capsys):
    logging.getLogger(name).addHandler(handler)
    say()
    assert handler.stream.getvalue() == f"lowtide says: {LINE}\n"
    assert capsys.readouterr().err == ""


def test_without_its_handler_it_is_printed_again(handler, capsys):
    LOG.addHandler(handler)
    LOG.removeHandler(handler)
    say()
    assert capsys.readouterr().err == f"lowtide: {LINE}\n"


def test_a_logger_that_does_not_propagate_is_heard_by_its_own_handlers_only(handler, capsys, monkeypatch):
    monkeypatch.setattr(LOG, "propagate", False)
    logging.getLogger().addHandler(handler)
    say()
    assert handler.stream.getvalue() == ""
    assert capsys.readouterr().err == f"lowtide: {LINE}\n"


def test_the_level_of_the_logger_is_respected(handler, level, capsys):
    LOG.setLevel(logging.WARNING)
    say()
    logging.getLogger().addHandler(handler)
    say()
    assert capsys.readouterr().err == handler.stream.getvalue() == ""
    LOG.setLevel(logging.INFO)
    say()
    assert LINE in handler.stream.getvalue()


def test_loaded_twice_it_prints_once(capsys):
    importlib.reload(console)
    say()
    assert capsys.readouterr().err == f"lowtide: {LINE}\n"


STEP = """
import logging, torch, lowtide

def step(features):
    model = torch.nn.Linear(features, features)
    lowtide.cap(model, "1GiB", prices="roofline")(torch.ones(8, features)).sum().backward()
"""
"""A user's training step; each number of features is a plan of its own."""

APPLICATION = """
step(4)
logging.basicConfig(format="mine: %(message)s")
step(5)
logging.getLogger("lowtide").setLevel(logging.ERROR)
step(6)
"""

TEST = """
def test_it(caplog):
    step(4)
    said = [record for record in caplog.records if record.name == "lowtide"]
    assert sum("nothing to do" in record.getMessage() for record in said) == 1
"""


def run(folder, *arguments):
    """What a Python of its own prints; it has the Lowtide that is tested here."""
    environment = {**os.environ, "PYTHONPATH": str(Path(lowtide.__file__).parents[1])}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_an_application_before_and_after_it_configures_its_logging(tmp_path):
    (tmp_path / "application.py").write_text(STEP + APPLICATION)
    printed = run(tmp_path, "application.py").stderr.splitlines()
    said = [line.partition(" nothing to do")[0] for line in printed if "nothing to do" in line]
    assert said == ["lowtide:", "mine:"], printed


@pytest.mark.slow
def test_caplog_of_pytest_sees_it(tmp_path):
    """In a pytest of its own: here the plugin is off, since torch logs every compile at DEBUG level."""
    (tmp_path / "test_it.py").write_text(STEP + TEST)
    found = run(tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_it.py")
    assert found.returncode == 0, found.stdout
