"""The documents are true: links lead somewhere, code runs, tables come from the committed results."""

import doctest
import importlib
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from lowtide.solve import METHODS

ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
METHOD_PAGES = sorted((ROOT / "docs" / "methods").glob("*.md"))
OVERVIEW = ROOT / "docs" / "how-it-works.md"
TOGETHER = {"keep_all": "segments", "sqrt_segments": "segments", "lower_sets_approximate": "lower_sets"}
"""Methods that share a page with another one."""
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
    for link in links:
        if not link.startswith("http"):
            assert (page.parent / link).exists(), link


def test_every_method_has_a_page_that_is_linked():
    pages = {TOGETHER.get(name, name) for name in METHODS} | {"bound"}
    assert pages == {page.stem for page in METHOD_PAGES}
    overview = OVERVIEW.read_text()
    for page in pages:
        assert f"](methods/{page}.md)" in overview, page


@pytest.mark.parametrize("page", METHOD_PAGES, ids=lambda path: path.stem)
def test_a_method_page_shows_its_pictures_and_names_its_method(page):
    text = page.read_text()
    names = [name for name in METHODS if TOGETHER.get(name, name) == page.stem] or [page.stem]
    for name in names:
        assert f"`{name}`" in text or f'"{name}"' in text or f"import {name}" in text, name
    images = re.findall(r"!\[[^]]+\]\(([^)]+)\)", text)
    assert images
    assert all((page.parent / image).suffix == ".svg" for image in images)


@pytest.mark.parametrize("page", METHOD_PAGES, ids=lambda path: path.stem)
def test_code_of_a_method_page_runs(page, monkeypatch):
    """Blocks of Python run in one namespace, sessions with >>> as doctests; excerpts are indented."""
    monkeypatch.chdir(ROOT)
    text = page.read_text()
    names = {}
    for block in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
        exec(compile(block, page.name, "exec"), names)
    session = doctest.DocTestParser().get_doctest(text, names, page.name, str(page), 0)
    failed = doctest.DocTestRunner(verbose=False).run(session, out=lambda line: print(line, end=""))
    assert failed.failed == 0


@pytest.mark.parametrize("page", [*METHOD_PAGES, OVERVIEW], ids=lambda path: path.stem)
def test_names_of_the_library_in_a_page_exist(page):
    text = page.read_text()
    for module, names in re.findall(r"from (lowtide[\w.]*) import ([\w, ]+)", text):
        found = importlib.import_module(module)
        for name in names.split(","):
            assert hasattr(found, name.strip()), f"{module}.{name}"
    for path in re.findall(r"`((?:\w+/)+\w+\.(?:py|c))`", text):
        roots = (ROOT, ROOT / "src" / "lowtide")
        assert any((root / path).exists() for root in roots), path


def test_tables_come_from_the_results():
    command = [sys.executable, str(ROOT / "benchmarks" / "tables.py"), "--check"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout


def test_code_of_the_budget_page_runs(capsys):
    page = (ROOT / "docs" / "choosing-a-budget.md").read_text()
    for block in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL):
        exec(compile(block, "choosing-a-budget.md", "exec"), {})
    assert "predicted peak" in capsys.readouterr().out


def test_code_of_the_page_on_sequences_runs(capsys):
    page = (ROOT / "docs" / "sequences.md").read_text()
    names = {}
    for block in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL):
        exec(compile(block, "sequences.md", "exec"), names)
    assert capsys.readouterr().out.strip() in page


def test_code_of_the_page_on_sketches_runs(capsys):
    page = (ROOT / "docs" / "sketch.md").read_text()
    names = {}
    for block in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL):
        exec(compile(block, "sketch.md", "exec"), names)
    printed = capsys.readouterr().out
    assert "noise / SGD's own" in printed
    assert (
        printed.strip().splitlines()[-2:]
        == re.search(r"```text\n(.*?)\n```", page, re.DOTALL)[1].splitlines()
    )


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_examples_run_and_are_short(example, capsys, monkeypatch):
    assert len(example.read_text().splitlines()) <= 80
    monkeypatch.setattr(sys, "argv", [str(example)])
    runpy.run_path(str(example), run_name="__main__")
    assert "peak" in capsys.readouterr().out
