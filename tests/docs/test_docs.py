from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from lowtide.plans.graph import FIELDS, OP_KINDS, VALUE_KINDS, Graph, Op, Value
from lowtide.plans.keep_all import keep_all
from lowtide.plans.planned_step import make_plan
from lowtide.plans.schedule import Run

GRAPH_FORMAT = (Path(__file__).parent.parent.parent / "docs" / "graph-format.md").read_text(encoding="utf-8")


def example() -> Graph:
    (found,) = re.findall(r"```json\n(.*?)```", GRAPH_FORMAT, flags=re.DOTALL)
    return Graph.from_json(found)


def test_the_example_peaks_where_the_page_says() -> None:
    stated = re.search(r"peaks at ([0-9]+) bytes, while `(\w+)`\s+runs", GRAPH_FORMAT)
    assert stated is not None
    plan = make_plan(example(), keep_all(example()), method="keep_all")
    assert plan.peak == int(stated[1])
    assert plan.schedule.steps[plan.timeline.peak_step] == Run(stated[2])


def test_the_example_comes_back_from_its_own_file() -> None:
    assert Graph.from_json(example().to_json()) == example()


def test_the_snippet_under_the_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (snippet,) = re.findall(r"```python\n(.*?)```", GRAPH_FORMAT, flags=re.DOTALL)
    (tmp_path / "graph.json").write_text(example().to_json(), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    exec(compile(snippet, "graph-format.md", "exec"), {})
    assert f"peaks at {capsys.readouterr().out.strip()} bytes" in GRAPH_FORMAT
    assert (tmp_path / "graph.html").exists()


@pytest.mark.parametrize("record", [Value, Op])
def test_every_field_is_documented_with_its_default(record: type[Value] | type[Op]) -> None:
    section = GRAPH_FORMAT.split(f"## {record.__name__}s\n")[1].split("\n## ")[0]
    for field in dataclasses.fields(record):
        row = re.search(rf"^\| `{field.name}` \| [^|]+ \| ([^|]+) \|", section, flags=re.MULTILINE)
        assert row is not None, field.name
        default = "needed" if field.default is dataclasses.MISSING else _written(field.default)
        assert row[1] == default, field.name


def _written(default: object) -> str:
    return f"`{json.dumps(default)}`"


def test_every_field_of_the_file_and_every_kind_is_documented() -> None:
    for name in ("lowtide", "version", *FIELDS):
        assert f"\n| `{name}` |" in GRAPH_FORMAT
    for kind in VALUE_KINDS:
        assert f"`{kind}`" in GRAPH_FORMAT
    for kind in OP_KINDS:
        assert f'`"{kind}"`' in GRAPH_FORMAT
