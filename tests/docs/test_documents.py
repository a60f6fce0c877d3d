"""The documents are true: links lead somewhere, code runs, tables come from the committed results."""

import doctest
import importlib
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn

import tables
from lowtide.cli.arguments import parse
from lowtide.solve import METHODS
from pages import EXAMPLES, PAGES, ROOT, anchors, blocks, commands, links, name_of, sessions

sys.path.insert(0, str(ROOT / "docs" / "site"))
from navigation import groups

METHOD_PAGES = sorted((ROOT / "docs" / "methods").glob("*.md"))
OVERVIEW = ROOT / "docs" / "how-it-works.md"
TOGETHER = {"keep_all": "segments", "sqrt_segments": "segments", "lower_sets_approximate": "lower_sets"}
"""Methods that share a page with another one."""
ELSEWHERE = {"docs/graph-format.md": "test_docs.py", "docs/getting-started.md": "test_getting_started.py"}
"""Pages whose code runs in a test of their own."""


def test_links_lead_somewhere():
    for source, link in [(page, link) for page in PAGES for link in links(page)]:
        path, _, anchor = link.partition("#")
        if path.startswith("http"):
            continue
        target = source.parent / path if path else source
        assert target.exists(), f"{name_of(source)}: {link}"
        assert not anchor or anchor in anchors(target), f"{name_of(source)}: {link}"


def test_anchors_are_those_of_code_hosts(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# The `cap`, [and](a.md) more\n\n## A\n\n## A\n\n```sh\n# no heading\n```\n")
    assert anchors(page) == {"the-cap-and-more", "a", "a-1"}


def test_every_page_and_example_is_in_the_navigation_once():
    listed = [path for group in groups(PAGES[0].read_text()) for _, path in group.pages]
    assert sorted(listed) == sorted(map(name_of, [*PAGES[1:], *EXAMPLES]))


def test_the_navigation_reads_groups_of_links():
    listed = "- **One**: [a](a.md) ·\n  [b](b.md)\n- **Two**: [c](c.md)\n"
    readme = (
        f"# Title\n\n[x](x.md)\n\n## Documentation\n\nSee.\n\n{listed}\n## More\n\n- **No**: [y](y.md)\n\n"
    )
    assert groups(readme) == [("One", [("a", "a.md"), ("b", "b.md")]), ("Two", [("c", "c.md")])]


def test_every_method_has_a_page_that_is_linked():
    pages = {TOGETHER.get(name, name) for name in METHODS} | {"bound"}
    assert pages == {page.stem for page in METHOD_PAGES}
    overview = OVERVIEW.read_text()
    for page in pages:
        assert f"](methods/{page}.md)" in overview, page


def test_method_pages_show_their_pictures_and_name_their_methods():
    for page in METHOD_PAGES:
        text = page.read_text()
        names = [name for name in METHODS if TOGETHER.get(name, name) == page.stem] or [page.stem]
        for name in names:
            assert f"`{name}`" in text or f'"{name}"' in text or f"import {name}" in text, name
        images = re.findall(r"!\[[^]]+\]\(([^)]+)\)", text)
        assert images, page
        assert all((page.parent / image).suffix == ".svg" for image in images), page


class Ran(NamedTuple):
    """What came of running a page's code."""

    page: str
    printed: str
    names: dict
    folder: Path


def of_the_readme():
    """What the README takes as given: a model with its loss and a batch, a cell and a sequence."""

    class Model(nn.Linear):
        def forward(self, x, y):
            return nn.functional.mse_loss(super().forward(x), y)

    model = Model(4, 4)
    return {
        "nn": nn,
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters()),
        "x": torch.ones(2, 4),
        "y": torch.zeros(2, 4),
        "cell": lambda carry, x: (torch.tanh(carry + x), carry.mean()),
        "start": torch.zeros(4, requires_grad=True),
        "xs": torch.ones(6, 4),
    }


def has_predicted(ran):
    assert "predicted peak" in ran.printed


def prints_what_the_page_says(ran):
    assert ran.printed.strip() in ran.page


def shows_the_noise_and_the_choices(ran):
    assert "noise / SGD's own" in ran.printed
    assert (
        ran.printed.strip().splitlines()[-2:]
        == re.search(r"```text\n(.*?)\n```", ran.page, re.DOTALL)[1].splitlines()
    )


def has_a_report(ran):
    assert ran.names["plan"].timeline.again > 0
    assert "measured after" in (ran.folder / "plan.html").read_text(encoding="utf-8")


def makes_a_step(ran):
    model, x = ran.names["make_step"](1)
    assert isinstance(model, nn.Module)
    assert x.shape == (1, 512, 512)


GIVEN = {"README.md": of_the_readme}
SHOWN: dict[str, Callable[[Ran], None]] = {
    "README.md": has_predicted,
    "docs/choosing-a-budget.md": has_predicted,
    "docs/command-line.md": makes_a_step,
    "docs/report.md": has_a_report,
    "docs/sequences.md": prints_what_the_page_says,
    "docs/sketch.md": shows_the_noise_and_the_choices,
}
"""What the code of a page has to show, beyond that it runs."""
WITH_CODE = [page for page in PAGES if "```python" in page.read_text() or ">>> " in page.read_text()]


def with_tools(path):
    """A page or an example as a case; training tools warn of much, and it is not ours."""
    uses_tools = "import lightning" in path.read_text()
    return pytest.param(path, marks=pytest.mark.filterwarnings("ignore") if uses_tools else ())


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [with_tools(page) for page in WITH_CODE if name_of(page) not in ELSEWHERE], ids=name_of
)
def test_code_of_a_page_runs(page, tmp_path, monkeypatch, capsys):
    """Blocks of Python run in one namespace, sessions with >>> as doctests; excerpts are indented."""
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    monkeypatch.chdir(tmp_path)
    names = GIVEN.get(name_of(page), dict)()
    for block in blocks(page):
        code = compile(block.code, page.name, "exec")
        if not block.reason:
            exec(code, names)
    session = doctest.DocTestParser().get_doctest(sessions(page), names, page.name, str(page), 0)
    failed = doctest.DocTestRunner(verbose=False).run(session, out=lambda line: print(line, end=""))
    assert failed.failed == 0, capsys.readouterr().out
    if name_of(page) in SHOWN:
        SHOWN[name_of(page)](Ran(page.read_text(), capsys.readouterr().out, names, tmp_path))


def test_pages_with_tests_of_their_own_have_them():
    for page, test in ELSEWHERE.items():
        assert Path(page).name in (ROOT / "tests" / "docs" / test).read_text()


def test_no_block_is_passed_over():
    """Every fence that opens a block of Python was seen, and only a reason keeps one from running."""
    for page in PAGES:
        found = blocks(page)
        assert len(found) == page.read_text().count("```python"), page
        assert all(len(block.reason.split()) > 3 for block in found if block.reason), page


def test_commands_in_transcripts_are_understood():
    calls = [call for page in PAGES for call in commands(page)]
    assert calls
    for call in calls:
        assert parse(call.split()).verb == call.split()[0]


def test_names_of_the_library_in_pages_exist():
    text = "\n".join(page.read_text() for page in [*METHOD_PAGES, OVERVIEW])
    for module, names in re.findall(r"from (lowtide[\w.]*) import ([\w, ]+)", text):
        found = importlib.import_module(module)
        for name in names.split(","):
            assert hasattr(found, name.strip()), f"{module}.{name}"
    for path in re.findall(r"`((?:\w+/)+\w+\.(?:py|c))`", text):
        roots = (ROOT, ROOT / "src" / "lowtide")
        assert any((root / path).exists() for root in roots), path


@pytest.mark.slow
def test_tables_come_from_the_results(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["tables.py", "--check"])
    assert tables.main() == 0, capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("example", [with_tools(path) for path in EXAMPLES], ids=lambda path: path.name)
def test_examples_run_and_are_short(example, capsys, monkeypatch):
    assert len(example.read_text().splitlines()) <= 80
    monkeypatch.setattr(sys, "argv", [str(example)])
    runpy.run_path(str(example), run_name="__main__")
    assert "peak" in capsys.readouterr().out
