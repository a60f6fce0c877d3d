"""The compiled search is built once, in a folder of its user alone, and what is not it is never loaded."""

import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from graphs import transformer
from lowtide.files import cache_folder as cache_module
from lowtide.plans.keep_all import keep_all
from lowtide.plans.simulator import simulate
from lowtide.solve import auto
from lowtide.solve.search import build
from lowtide.solve.search.build import _name, build_ahead, library

BUILT = library()
"""The one of this run of the tests; building another takes seconds, or many on a busy machine."""

needs_compiler = pytest.mark.skipif(BUILT is None, reason="there is no C compiler here")


@pytest.fixture
def fresh_library(tmp_path, monkeypatch):
    """A cache folder that is not there yet, and nothing remembered from before or for later."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("LOWTIDE_CACHE", str(folder))
    monkeypatch.setattr(sys.modules["lowtide.solve.auto"], "_remembered", {})
    monkeypatch.setattr(build, "_builders", [])
    monkeypatch.setattr(build, "PATIENCE", 600.0)  # the machine may be busy
    for remembered in (library, cache_module._say, cache_module._tidy_once):
        remembered.cache_clear()
    yield folder
    for remembered in (library, cache_module._say, cache_module._tidy_once):
        remembered.cache_clear()


@pytest.fixture
def quick_build(fresh_library, monkeypatch):
    """A compiler that hands out the library that is here already, and counts how often it was asked."""
    data, built = Path(BUILT._name).read_bytes(), []

    def hand_out(command, scratch):
        built.append(1)
        Path(command[command.index("-o") + 1]).write_bytes(data)

    monkeypatch.setattr(build, "_compile", hand_out)
    return built


def the_library(folder):
    (built,) = folder.glob("*.so")
    return built


def test_a_cache_may_serve_several_kinds_of_machine(monkeypatch):
    here = _name("")
    assert _name("") == here
    monkeypatch.setattr("platform.machine", lambda: "another")
    assert _name("") != here


def test_it_is_built_ahead_once_and_not_where_it_is_there(fresh_library, monkeypatch):
    built = []
    monkeypatch.setattr(build, "_build", built.append)
    fresh_library.mkdir()
    (fresh_library / _name("0")).touch()
    build_ahead()
    assert not build._builders
    (fresh_library / _name("0")).unlink()
    for _ in range(2):
        build_ahead()
    build._builders[0].join()
    assert built == [fresh_library]


def test_a_build_ahead_that_fails_is_left_to_the_search(fresh_library, monkeypatch):
    def no_compiler(folder):
        raise OSError("there is no C compiler")

    monkeypatch.setattr(build, "_build", no_compiler)
    build_ahead()
    build._builders[0].join()


@pytest.mark.slow
@pytest.mark.parametrize("settings_", [{"LOWTIDE_NATIVE": "0"}, {"PATH": "", "CC": "none"}])
def test_there_is_a_plan_without_a_compiler(fresh_library, monkeypatch, caplog_lowtide, settings_):
    for name, value in settings_.items():
        monkeypatch.setenv(name, value)
    graph = transformer(2)
    budget = simulate(graph, keep_all(graph)).peak * 2 // 3
    assert library() is None
    assert simulate(graph, auto(graph, budget)).peak <= budget
    assert not [*fresh_library.glob("*")]
    assert [message for message in caplog_lowtide if "no C compiler" in message] == caplog_lowtide
    assert len(caplog_lowtide) == ("PATH" in settings_)  # what was asked for is no news


@pytest.mark.slow
@needs_compiler
def test_it_is_built_once_and_whole(fresh_library):
    assert library() is not None
    (built,) = fresh_library.iterdir()
    assert built.suffix == ".so"
    first = built.stat()
    library.cache_clear()
    assert library() is not None
    assert [*fresh_library.iterdir()] == [built]
    assert (built.stat().st_ino, built.stat().st_mtime_ns) == (first.st_ino, first.st_mtime_ns)


DAMAGE = {
    "truncated": lambda data: data[: len(data) // 3],
    "zeroed": lambda data: bytes(len(data)),
    "empty": lambda data: b"",
    "garbage": lambda data: b"no library at all",
    "one bit": lambda data: data[:-9] + bytes([data[-9] ^ 1]) + data[-8:],
}


@needs_compiler
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_library_is_built_anew(fresh_library, quick_build, damage):
    assert library() is not None
    whole = the_library(fresh_library).read_bytes()
    library.cache_clear()
    path = the_library(fresh_library)
    path.unlink()  # this process has that file mapped, and may still look at it
    path.write_bytes(DAMAGE[damage](whole))
    path.chmod(0o600)
    assert library() is not None
    assert the_library(fresh_library).read_bytes() == whole
    assert len(quick_build) == 2


@needs_compiler
def test_a_library_without_the_functions_is_built_anew(fresh_library, quick_build, tmp_path):
    source, other = tmp_path / "other.c", tmp_path / "other.so"
    source.write_text("int other(void) { return 1; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", other, source], check=True)
    fresh_library.mkdir(mode=0o700, exist_ok=True)
    planted = fresh_library / _name(build._digest(other.read_bytes()))
    planted.write_bytes(other.read_bytes())
    planted.chmod(0o600)
    assert library() is not None
    assert not planted.exists()


@needs_compiler
def test_a_library_that_others_could_write_is_not_loaded(fresh_library, quick_build):
    assert library() is not None
    library.cache_clear()
    the_library(fresh_library).chmod(0o666)
    assert library() is not None
    assert stat.S_IMODE(the_library(fresh_library).stat().st_mode) == 0o600
    assert len(quick_build) == 2


@needs_compiler
def test_a_link_to_a_library_is_not_loaded(fresh_library, quick_build, tmp_path):
    assert library() is not None
    library.cache_clear()
    built = the_library(fresh_library)
    built.rename(tmp_path / "elsewhere.so")
    built.symlink_to(tmp_path / "elsewhere.so")
    assert library() is not None
    assert not built.is_symlink()


def test_a_compiler_that_hangs_is_ended_with_its_children(
    fresh_library, monkeypatch, tmp_path, caplog_lowtide
):
    child = tmp_path / "child"
    compiler = tmp_path / "cc"
    compiler.write_text(f"#!/bin/sh\nsleep 600 &\necho $! > {child}\nwait\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))

    class Begun(subprocess.Popen):
        """On a busy machine the shell may take longer to begin than a compiler is waited for."""

        def wait(self, timeout=None):
            while not (child.exists() and child.read_text().endswith("\n")):
                time.sleep(0.01)
            return super().wait(timeout)

    monkeypatch.setattr(build.subprocess, "Popen", Begun)
    monkeypatch.setattr(build, "PATIENCE", 0.5)
    assert library() is None
    assert "did not end in 0.5 s" in caplog_lowtide[0]
    assert not [*fresh_library.iterdir()]
    while is_running(int(child.read_text())):
        time.sleep(0.01)


def is_running(process):
    """Whether a process runs; one that has ended stays in the table until it is asked for."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_what_a_compiler_says_is_told(fresh_library, monkeypatch, tmp_path, caplog_lowtide):
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho 'no such header' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    assert library() is None
    assert "no such header" in caplog_lowtide[0]


MEMORY = """
import resource, sys
from graphs import transformer
from lowtide.plans.keep_all import keep_all
from lowtide.plans.simulator import simulate
from lowtide.solve import auto
from lowtide.solve.search.build import library
assert library() is not None
graph = transformer(int(sys.argv[2]))
budget = simulate(graph, keep_all(graph)).peak // 2
with open("/proc/self/statm") as sizes:
    now = int(sizes.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (now + int(sys.argv[1]), -1))
try:
    print("planned", simulate(graph, auto(graph, budget)).peak <= budget)
except MemoryError:
    print("MemoryError")
"""


@pytest.mark.slow
@needs_compiler
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs Linux")
@pytest.mark.parametrize("room", [2 << 20, 6 << 20])
def test_a_memory_limit_is_no_crash(room):
    command = [sys.executable, "-c", MEMORY, str(room), "12"]
    paths = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    ran = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths}, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() in ("planned True", "MemoryError")
