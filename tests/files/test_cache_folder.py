"""The cache folder is one of this user alone, or there is none and one line says why."""

import os
import stat
import subprocess
import sys

import pytest

from lowtide.files import cache_folder as module
from lowtide.files.cache_folder import NoCache, cache_folder, private_folder


@pytest.fixture(autouse=True)
def said_anew():
    for remembered in (module._say, module._tidy_once):
        remembered.cache_clear()
    yield
    for remembered in (module._say, module._tidy_once):
        remembered.cache_clear()


def test_a_tilde_is_the_home_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("LOWTIDE_CACHE", "~/kept")
    assert cache_folder() == tmp_path / "kept"


@pytest.mark.parametrize("variable", ["LOWTIDE_CACHE", "XDG_CACHE_HOME"])
def test_relative_paths_are_refused(monkeypatch, tmp_path, variable, caplog_lowtide):
    monkeypatch.delenv("LOWTIDE_CACHE")
    monkeypatch.setenv(variable, "kept")
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        with pytest.raises(NoCache, match=f"{variable}='kept' is not an absolute path"):
            private_folder()
    assert not [*tmp_path.iterdir()]
    (line,) = caplog_lowtide
    assert "set LOWTIDE_CACHE" in line


@pytest.mark.parametrize("umask", [0, 0o077, 0o777])
def test_folders_are_for_their_user_alone(monkeypatch, tmp_path, umask):
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path / "new" / "kept"))
    before = os.umask(umask)
    try:
        folder = private_folder("prices")
    finally:
        os.umask(before)
    for made in (folder, folder.parent, folder.parent.parent):
        assert stat.S_IMODE(made.stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702, 0o1777])
def test_a_folder_that_others_may_write_to_is_not_used(monkeypatch, tmp_path, mode, caplog_lowtide):
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    tmp_path.chmod(mode)
    with pytest.raises(NoCache, match=r"others? (users )?may write"):
        private_folder()
    tmp_path.chmod(0o755)
    assert private_folder() == tmp_path
    assert len(caplog_lowtide) == 1


def test_a_folder_of_another_user_is_not_used(monkeypatch, tmp_path):
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    if tmp_path.stat().st_uid == 0:  # root could write anywhere anyway
        os.chown(tmp_path, 12345, -1)
        monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(NoCache, match="belongs to user"):
        private_folder()


def test_a_file_is_no_folder(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    for name in ("file", "file/below"):
        monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path / name))
        with pytest.raises(NoCache, match=r"ot a (folder|directory)"):
            private_folder()


NOBODY = """
import pwd
def no_entry(number):
    raise KeyError(number)
pwd.getpwuid = no_entry
import torch, lowtide
model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(4)))
lowtide.cap(model, "100%")
model(torch.ones(64, 16)).sum().backward()
assert all(p.grad is not None for p in model.parameters())
print(lowtide.plan(model, torch.ones(64, 16), budget="80%", prices="measured").peak > 0)
"""


@pytest.mark.slow
def test_a_user_without_a_home_gets_a_plan():
    """Neither HOME nor an entry in the password file, as in many containers."""
    kept = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    kept |= {name: value for name, value in os.environ.items() if name.startswith(("OMP", "ONEDNN"))}
    ran = subprocess.run(
        [sys.executable, "-c", NOBODY], capture_output=True, text=True, env=kept, cwd="/", check=False
    )
    assert ran.stdout == "True\n", ran.stderr
    assert ran.stderr.count("no cache: this user has no home folder") == 1
    assert "Traceback" not in ran.stderr
