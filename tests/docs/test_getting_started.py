"""The page getting-started.md: its code runs, its plans are what it shows, and it is short."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from getting_started import PAGE, Session, blocks
from lowtide.units import parse_budget

pytestmark = pytest.mark.slow

TEXT = PAGE.read_text(encoding="utf-8")
SMALLER = {"(8, 512)": "(1, 16)", '"n_layer": 6': '"n_layer": 1'}


@pytest.fixture(autouse=True)
def transformers() -> None:
    """Imported by the tests that run: it takes seconds."""
    pytest.importorskip("transformers", reason="transformers is not installed (the extra dev)")


def starting_with(word: str) -> tuple[str, str]:
    (found,) = [block for block in blocks(TEXT) if block[0].startswith(word)]
    return found


@pytest.mark.whole_search
def test_plans_are_as_the_page_says() -> None:
    """At full size, since a plan computes nothing."""
    session = Session()
    for word in ("import", "try"):
        code, shown = starting_with(word)
        assert session.printed(code) == shown


def test_everything_runs_at_a_small_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page, session = TEXT, Session()
    for large, small in SMALLER.items():
        assert page.count(large) == 1
        page = page.replace(large, small)
    said = "".join(session.printed(code) for code, _ in blocks(page))
    assert "verified: yes" in said
    assert (tmp_path / "plan.html").exists()


def test_a_gigabyte_is_saved_in_thirty_lines() -> None:
    assert sum(len(code.strip().splitlines()) for code, _ in blocks(TEXT)) <= 30
    shown = starting_with("lowtide.uncap")[1]
    uncapped, measured = (size_of(name, shown) for name in ("uncapped peak", "measured peak"))
    assert uncapped - measured >= 10**9
    assert "as predicted" in shown


def size_of(name: str, shown: str) -> int:
    found = re.search(rf"{name} +([\d.]+) (\w+)", shown)
    assert found is not None
    size = parse_budget(found[1] + found[2]).bytes
    assert size is not None
    return size
