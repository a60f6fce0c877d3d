"""The doctor tells what works here, and what does not by its name."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from lowtide import _torch
from lowtide.cli import doctor
from lowtide.cli.main import main
from lowtide.solve.search import native


def states(health: doctor.Health) -> dict[str, str]:
    return {check.name: check.state for check in health.checks}


@pytest.mark.slow
def test_all_is_well_here(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "kernel").write_bytes(bytes(2048))
    assert main(["doctor", "--json"]) == 0
    out, err = capsys.readouterr()
    data = json.loads(out)
    found = {check["name"]: check["state"] for check in data["checks"]}
    assert err == ""
    assert data["ok"] is True
    assert {found[name] for name in ("lowtide", "python", "torch", "torch's internals", "a capped step")} == {
        "ok"
    }
    assert data["caches"][1] == {"path": str(tmp_path), "bytes": 2048, "holds": "torch's compiled kernels"}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_capped_step", lambda: doctor.Check("a capped step", "ok", ""))
    monkeypatch.setattr(doctor, "_caches", lambda: ())


@pytest.mark.usefixtures("quick")
def test_a_private_name_that_is_gone_is_broken(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(_torch.NAMES, "gone", ("torch._C:_no_such_thing", "2.11-2.13"))
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "broken   torch's internals  this torch has no torch._C:_no_such_thing\n" in out
    assert out.endswith("does not work here: torch's internals\n")


@pytest.mark.usefixtures("quick")
def test_a_torch_that_is_old_or_absent_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.__version__", "2.9.1+cu130")
    assert doctor.examine().checks[2] == doctor.Check(
        "torch", "broken", "2.9.1+cu130 is too old: Lowtide needs 2.11 or later"
    )
    monkeypatch.setitem(sys.modules, "torch", None)
    assert not (found := doctor.examine()).ok
    assert "cpu" not in states(found)


@pytest.mark.slow
def test_a_step_that_does_not_hold_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> bool:
        raise RuntimeError("no\nway")

    monkeypatch.setattr(sys.modules["lowtide.evidence.verification"], "verify", fails)
    assert doctor._capped_step() == doctor.Check("a capped step", "broken", "RuntimeError: no way")
    monkeypatch.setattr(sys.modules["lowtide.evidence.verification"], "verify", lambda *_, **__: "")
    assert doctor._capped_step().state == "broken"


@pytest.mark.usefixtures("quick")
def test_extras_that_are_not_there_are_missing_and_that_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(native, "library", lambda: None)
    monkeypatch.setattr(doctor, "_version", lambda name: None)
    found = doctor.examine()
    assert found.ok
    extras = ("triton", "C++ compiler", "native search", "highspy", "rich")
    assert {states(found)[name] for name in extras} == {"missing"}
    assert 'pip install "lowtide[exact]"' in str(found)
    monkeypatch.setenv("LOWTIDE_NATIVE", "0")
    assert "switched off by LOWTIDE_NATIVE=0" in str(doctor.examine())
