"""What is installed works: wheel and sdist hold all files, and the demonstration runs from the wheel alone.

The package is built as a release is, by `python -m build`, which fetches the build backend through pip. It is
installed into an environment of its own that sees the libraries of this one (torch is large) and not the
checkout.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from once import once
from pages import ROOT

pytestmark = pytest.mark.slow

SOURCES = ROOT / "src" / "lowtide"
ALONE = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
"""The environment without the way to the checkout."""


def build(out, *options):
    """Build the package into a folder; where its backend cannot be fetched, skip the test."""
    pytest.importorskip("build", reason="build is not installed (the extra dev)")
    command = [sys.executable, "-m", "build", *options, "--outdir", str(out), str(ROOT)]
    built = subprocess.run(command, cwd=out, capture_output=True, text=True, check=False)
    said = built.stdout + built.stderr
    if "No matching distribution found for hatchling" in said:
        pytest.skip("pip cannot fetch hatchling, the build backend, here")
    assert built.returncode == 0, said
    return out


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """A folder with the sdist, and the wheel that was made from it."""
    return once(tmp_path_factory, "released", build)


def wheel_in(folder):
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def environment(released, tmp_path_factory):
    """An environment with nothing of its own but the wheel."""
    return once(tmp_path_factory, "environment", lambda folder: install(wheel_in(released), folder))


def install(wheel, folder):
    python = folder / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    pip = [sys.executable, "-m", "pip", "--quiet", "--python", python, "install", "--no-deps", "--no-index"]
    subprocess.run([*pip, wheel], env=ALONE, check=True)
    add_libraries_of_this_environment(folder)


def add_libraries_of_this_environment(folder):
    """By a plain path, whose own .pth files are not read: an editable install of the checkout is not seen."""
    paths = sysconfig.get_paths(vars={"base": folder, "platbase": folder})
    here = sysconfig.get_paths()
    lines = dict.fromkeys([here["purelib"], here["platlib"]])
    (Path(paths["purelib"]) / "libraries.pth").write_text("\n".join(lines) + "\n")


def run(environment, folder, *command):
    """What a program of the environment prints, in a folder that has nothing to do with the checkout."""
    found = subprocess.run(
        [environment / "bin" / command[0], *command[1:]],
        cwd=folder,
        env=ALONE | {"LOWTIDE_CACHE": str(folder / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout.strip()


def contents(wheel):
    with zipfile.ZipFile(wheel) as packed:
        return {name: packed.read(name) for name in packed.namelist()}


def test_the_wheel_holds_every_file_of_the_package(released):
    own = [path for path in SOURCES.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    expected = {path.relative_to(SOURCES.parent).as_posix(): path.read_bytes() for path in own}
    packed = contents(wheel_in(released))
    assert {name: text for name, text in packed.items() if name.startswith("lowtide/")} == expected
    assert {Path(name).suffix for name in expected} >= {".c", ".h", ".css", ".js", ".typed"}


def test_the_wheel_of_the_sdist_is_that_of_the_checkout(released, tmp_path):
    assert contents(wheel_in(released)) == contents(wheel_in(build(tmp_path, "--wheel")))


def test_the_sdist_holds_what_a_packager_needs(released):
    (sdist,) = released.glob("*.tar.gz")
    with tarfile.open(sdist) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    assert {"CHANGELOG.md", "LICENSE", "README.md", "pyproject.toml", "tests/conftest.py"} <= names


def test_the_demonstration_runs_from_the_wheel(environment, tmp_path):
    place = run(environment, tmp_path, "python", "-c", "import lowtide; print(lowtide.__file__)")
    assert Path(place).is_relative_to(environment), "the checkout, or another Lowtide, was imported"
    said = run(environment, tmp_path, "lowtide", "demo", "--steps", "1")
    assert "gradients identical: yes" in said
    page = (tmp_path / "demo-output" / "report.html").read_text(encoding="utf-8")
    for part in [*SOURCES.glob("report/*.js"), *SOURCES.glob("report/*.css")]:
        assert part.read_text(encoding="utf-8").strip().splitlines()[-1] in page, part.name


@pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="there is no C compiler")
def test_the_search_is_compiled_from_the_wheel(environment, tmp_path):
    code = (
        "from lowtide.solve.search import build, native\n"
        "build.PATIENCE = 600.0  # the machine may be busy\n"
        "print(native.library() is not None)"
    )
    assert run(environment, tmp_path, "python", "-c", code) == "True"


def test_torch_is_told_of_the_backend(environment, tmp_path):
    """In its own group of entry points, which `torch.compile(backend="lowtide")` looks through."""
    code = (
        "from importlib.metadata import entry_points\n"
        "print(*(point.value for point in entry_points(group='torch_dynamo_backends')))"
    )
    assert run(environment, tmp_path, "python", "-c", code) == "lowtide.entry.dynamo_backend:lowtide"
