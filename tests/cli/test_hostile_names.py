"""Names in a file reach standard output, standard error and reports as text that nothing obeys."""

import json

import pytest

from graphs import chain
from lowtide.cli.main import main
from lowtide.files.plain_text import plain

EVIL = "\x1b]0;title\x07\x1b[2J\r\u202egpj\u2028\nlowtide: all is well"


@pytest.fixture
def file(tmp_path):
    data = chain(6, 1 << 20).to_dict() | {"device": f"cpu{EVIL}", "prices": EVIL, "fixed": {EVIL: 5}}
    data["ops"] = [op | {"module": f"layer{EVIL}", "source": EVIL, "target": EVIL} for op in data["ops"]]
    path = tmp_path / "graph.json"
    path.write_text(json.dumps(data))
    return path


@pytest.mark.parametrize(
    "words",
    [
        ["plan", "--budget", "70%"],
        ["plan", "--budget", "1KiB"],
        ["plan", "--budget", "70%", "--json"],
        ["report", "-o", "-"],
        ["frontier"],
        ["compare", "--budgets", "70%", "--methods", "sqrt_segments"],
        ["plan", "--budget", "90% of device"],
    ],
    ids=" ".join,
)
def test_nothing_of_a_name_is_obeyed(file, capsys, words):
    main([words[0], str(file), *words[1:]])
    said = capsys.readouterr()
    assert said.out or said.err
    for text in said:
        assert plain(text, keep="\n\t") == text
        assert "lowtide: all is well" not in text.split("\n")


def test_nothing_of_a_file_that_is_wrong_is_obeyed(file, capsys):
    data = json.loads(file.read_text())
    data["ops"][2]["reads"] = [EVIL]
    file.write_text(json.dumps(data | {EVIL: 1}))
    for _ in range(2):
        assert main(["plan", str(file), "--budget", "70%"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.isprintable()
        file.write_text(json.dumps(data))
