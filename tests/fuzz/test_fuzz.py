"""A few cases of each part of `make fuzz`, the same ones each time."""

import importlib
import os
import subprocess
import sys

import pytest

from fuzz import sanitized_part
from fuzz.__main__ import PARTS


@pytest.fixture(autouse=True)
def a_cache_of_its_own(tmp_path, monkeypatch):
    """The part of files writes prices that are none."""
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("part", ["files", "graphs"])
def test_cases_hold(part, seed):
    importlib.import_module(f"fuzz.{part}_part").case(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 3])
def test_modules_hold(seed):
    importlib.import_module("fuzz.modules_part").case(seed)


@pytest.mark.slow
@pytest.mark.skipif(sanitized_part.sanitizer() is None, reason=f"{sanitized_part.missing()}")
def test_the_compiled_search_holds_under_its_sanitizers(monkeypatch):
    sanitized_part.case(7)
    # They are at work: where bytes are not counted in larger units, sums over runs wrap around.
    monkeypatch.setenv("LOWTIDE_FUZZ_EXACT_BITS", "60")
    with pytest.raises(AssertionError, match="signed integer overflow"):
        sanitized_part.case(5)


def test_a_case_that_does_not_hold_is_told_with_its_seed(monkeypatch, capsys):
    from fuzz import __main__ as driver

    def wrong(seed):
        assert seed < 3000, "three thousand"

    monkeypatch.setattr(importlib.import_module("fuzz.files_part"), "case", wrong)
    assert driver._run(["files"], 0, float("inf")) == 1
    assert "three thousand" in (said := capsys.readouterr().err)
    assert "--part files --case 3000" in said


@pytest.mark.slow
def test_the_command_prints_its_seed_and_ends_in_time():
    command = [sys.executable, "-m", "fuzz", "--minutes", "0.01", "--seed", "4", "--part", "files"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("seed 4, 0.01 minutes: files")
    assert "all hold" in ran.stdout
    assert "modules" in PARTS
