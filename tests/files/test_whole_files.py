"""Files are whole or as they were, under names nobody can prepare; nothing stays of a killed process."""

import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lowtide.files import whole_files
from lowtide.files.whole_files import scratch_folder, tidy, write_whole


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_link_under_the_name_aside_is_not_followed(tmp_path, monkeypatch):
    victim = tmp_path / "victim"
    victim.write_text("dear")
    monkeypatch.setattr(whole_files.secrets, "token_hex", lambda size: "guessed")
    (tmp_path / f"{whole_files._prefix()}guessed.part").symlink_to(victim)
    whole_files._mine.add(f"{whole_files._prefix()}guessed.part")  # so that it is not tidied before
    with pytest.raises(FileExistsError):
        write_whole(tmp_path / "plan.json", b"{}")
    assert victim.read_text() == "dear"


def test_the_name_aside_is_another_each_time(tmp_path, monkeypatch):
    seen, real = [], os.open

    def note(path, *more):
        seen.append(Path(path).name)
        return real(path, *more)

    monkeypatch.setattr(os, "open", note)
    for _ in range(2):
        write_whole(tmp_path / "plan.json", b"{}")
    assert len({name for name in seen if name.endswith(".part")}) == 2


def test_a_file_keeps_its_mode_and_a_new_one_has_the_usual(tmp_path):
    before = os.umask(0o027)
    try:
        write_whole(tmp_path / "new", b"1")
        (tmp_path / "old").touch(mode=0o600)
        write_whole(tmp_path / "old", b"2")
        write_whole(tmp_path / "private", b"3", mode=0o600)
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == {"new": 0o640, "old": 0o600, "private": 0o600}


def test_a_full_disk_leaves_the_file_that_was_there(tmp_path, monkeypatch):
    def full(handle):
        raise OSError(28, "No space left on device")

    write_whole(tmp_path / "plan.json", b"before")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_whole(tmp_path / "plan.json", b"after")
    assert names(tmp_path) == ["plan.json"]
    assert (tmp_path / "plan.json").read_bytes() == b"before"


KILLED = """
import os, signal, sys
from pathlib import Path
from lowtide.files import whole_files
os.fsync = lambda handle: os.kill(os.getpid(), signal.SIGKILL)
folder = Path(sys.argv[1])
if sys.argv[2] == "folder":
    with whole_files.scratch_folder(folder) as scratch:
        (scratch / "half.so").touch()
        os.fsync(0)
whole_files.write_whole(folder / "plan.json", b"{}")
"""


@pytest.mark.parametrize("what", ["file", "folder"])
def test_what_a_killed_process_left_is_taken_away(tmp_path, what):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    killed = subprocess.run([sys.executable, "-c", KILLED, tmp_path, what], env=env, check=False)
    assert killed.returncode < 0
    assert len(names(tmp_path)) == 1
    write_whole(tmp_path / "plan.json", b"{}")
    assert names(tmp_path) == ["plan.json"]


def test_what_is_under_way_stays(tmp_path):
    other_machine = tmp_path / ".lowtide-00000000-1-x.part"
    other_machine.touch()
    running = tmp_path / f".lowtide-{whole_files._machine()}-{os.getppid()}-x.part"
    running.touch()
    with scratch_folder(tmp_path) as scratch:
        tidy(tmp_path)
        assert names(tmp_path) == sorted([scratch.name, other_machine.name, running.name])
    long_ago = time.time() - 2 * whole_files._DAY
    os.utime(other_machine, (long_ago, long_ago))
    tidy(tmp_path)
    assert names(tmp_path) == [running.name]


def test_a_link_that_was_left_is_taken_away_and_not_what_it_leads_to(tmp_path):
    (tmp_path / "dear").mkdir()
    (tmp_path / "dear" / "file").touch()
    left = tmp_path / f".lowtide-{whole_files._machine()}-{os.getpid()}-x.part"
    left.symlink_to(tmp_path / "dear")
    tidy(tmp_path)
    assert names(tmp_path) == ["dear"]
    assert names(tmp_path / "dear") == ["file"]
