"""The documents are true: links lead somewhere, code runs, tables come from the committed results."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
    for link in links:
        if not link.startswith("http"):
            assert (page.parent / link).exists(), link


def test_tables_come_from_the_results():
    command = [sys.executable, str(ROOT / "benchmarks" / "tables.py"), "--check"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout


def test_code_of_the_budget_page_runs(capsys):
    page = (ROOT / "docs" / "choosing-a-budget.md").read_text()
    for block in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL):
        exec(compile(block, "choosing-a-budget.md", "exec"), {})
    assert "predicted peak" in capsys.readouterr().out


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_examples_run_and_are_short(example, capsys):
    assert len(example.read_text().splitlines()) <= 80
    runpy.run_path(str(example), run_name="__main__")
    assert "peak" in capsys.readouterr().out
