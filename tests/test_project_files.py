"""Files that people and machines expect beside the code say the same as the code."""

import re
import tomllib

import pytest

import lowtide
from pages import ROOT

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed (the extra dev)")

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = {
    path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / ".github/workflows").glob("*.yml")
}


def matrix():
    return WORKFLOWS["tests"]["jobs"]["tests"]["strategy"]["matrix"]


def test_each_python_that_the_package_names_is_tested():
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    assert matrix()["python"] == named
    assert PROJECT["requires-python"] == f">={named[0]}"


def test_the_oldest_torch_and_the_pinned_one_are_tested():
    assert f"torch>={matrix()['torch'][0]}" in PROJECT["dependencies"]
    pinned = re.search(r"^torch==(\d+\.\d+)", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE)
    assert matrix()["torch"][-1] == pinned[1]


def test_tests_run_with_the_settings_of_the_makefile():
    (settings,) = re.findall(r"^TEST_ENV := (.+)$", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    (step,) = [
        step for step in WORKFLOWS["tests"]["jobs"]["tests"]["steps"] if "pytest" in step.get("run", "")
    ]
    assert " ".join(f"{name}={value}" for name, value in step["env"].items()) == settings


def test_what_is_installed_is_used_away_from_the_checkout():
    job = WORKFLOWS["package"]["jobs"]["install"]
    assert job["strategy"]["matrix"]["kind"] == ["whl", "tar.gz"]
    assert not [step for step in job["steps"] if "checkout" in step.get("uses", "")]
    runs = "\n".join(step.get("run", "") for step in job["steps"])
    assert "import lowtide" in runs
    assert "lowtide demo" in runs


def test_a_bug_report_asks_for_what_is_needed():
    form = yaml.safe_load((ROOT / ".github/ISSUE_TEMPLATE/bug.yml").read_text())
    asked = {part["id"]: part for part in form["body"]}
    for name, command in {"doctor": "lowtide doctor --json", "graph": "lowtide capture"}.items():
        assert command in str(asked[name]["attributes"])
        assert asked[name]["validations"]["required"]


def test_hooks_are_the_checks_of_the_makefile():
    (repo,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repo["repo"] == "local"
    used = {hook["entry"].removesuffix(" --force-exclude") for hook in repo["hooks"]}
    recipe = re.search(r"^check:.*\n((?:\t.+\n)+)", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)[1]
    checks = re.findall(r"\$\(BIN\)/(ruff \w+|mypy)", recipe)
    assert used == {f".venv/bin/{check}" for check in checks}


def test_the_citation_is_of_this_version_and_names_the_papers():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["version"] == lowtide.__version__
    assert cited["license"] == PROJECT["license"]
    assert cited["repository-code"] == PROJECT["urls"]["Homepage"]
    first = [paper["authors"][0]["family-names"] for paper in cited["references"]]
    named = (ROOT / "README.md").read_text().partition("## Papers")[2]
    assert all(
        f"{author} et al. {paper['year']}" in named
        for author, paper in zip(first, cited["references"], strict=True)
    )


def test_extras_are_pinned_for_development():
    pinned = (ROOT / "constraints.txt").read_text().lower().replace("_", "-")
    extras = PROJECT["optional-dependencies"]
    for name in {each for extra in extras.values() for each in extra} - {"lowtide[exact,rich,tools]"}:
        assert f"\n{name}==" in pinned, name
