"""The head-to-head: its rows are right and can be continued, its tools, verdict and picture too."""

import json
import math
import os
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as Xml
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import headtohead
import headtohead_others
from headtohead_measure import Stand, calm
from headtohead_models import SUBJECTS
from headtohead_picture import HEIGHT, WIDTH, frontier, picture
from headtohead_results import (
    MODELS,
    TOOLS,
    beside_unmet,
    dominated,
    key,
    keys,
    latest,
    verdict_text,
)
from headtohead_table import table, verdict_table
from headtohead_tools import blocks, budget_of, tool
from headtohead_turn import Turn
from headtohead_work import without_paths
from once import once
from peak import at_the_peak
from row_files import append, read

TINY = ("--device", "cpu", "--tiny", "--steps", "2", "--workers", "1", "--models", "gpt")


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """One tiny model through the whole script, in processes of its own."""
    asked = [*TINY, "--tools", "eager,lowtide-eager", "--settings", "45%,min", "--out"]

    def make(folder):
        headtohead.main([*asked, str(folder / "rows.jsonl")])

    return once(tmp_path_factory, "headtohead", make) / "rows.jsonl"


@pytest.mark.slow
def test_every_row_that_was_asked_for_is_there(rows):
    found = {key(row)[1:]: row for row in read(rows)}
    settings = {("lowtide-eager", setting) for setting in ("uncapped", "45%", "min")}
    assert set(found) == {("eager", ""), *settings}
    assert found["lowtide-eager", "45%"]["refused"]
    assert found["lowtide-eager", "45%"]["smallest"] > found["lowtide-eager", "45%"]["budget"]
    ran = {name: row for name, row in found.items() if name[1] != "45%"}
    for row in ran.values():
        assert row["gradients"] == "ok"
        assert 0 < row["baseline"] < row["peak"]
        assert row["milliseconds"] > 0
        assert row["setup_seconds"] >= 0
    for name in ("uncapped", "min"):
        assert found["lowtide-eager", name]["peak"] == found["lowtide-eager", name]["predicted_peak"]
    assert found["lowtide-eager", "min"]["peak"] < found["eager", ""]["peak"]


@pytest.mark.slow
def test_a_row_says_how_to_get_it_again_and_nothing_of_the_machine(rows):
    row = read(rows)[0]
    typed = "PYTHONPATH=src python benchmarks/headtohead.py --models gpt --tools eager --steps 2 --device cpu"
    assert row["command"] == f"{typed} --tiny"
    assert row["torch"] == torch.__version__
    assert not re.search(r'[ "]/\w', rows.read_text())


@pytest.mark.slow
def test_what_the_file_has_is_not_run_again(rows, monkeypatch, capsys):
    before = rows.read_text()
    monkeypatch.setattr(headtohead.subprocess, "Popen", None)
    arguments = [*TINY, "--tools", "eager,lowtide-eager", "--settings", "45%,min", "--out", str(rows)]
    headtohead.main(arguments)
    assert rows.read_text() == before
    assert "Lowtide, eager | min |" in capsys.readouterr().out
    with pytest.raises(TypeError):
        headtohead.main([*arguments, "--again", "all"])


@pytest.mark.slow
def test_the_table_and_the_plots_come_from_the_file_alone(rows, tmp_path, capsys):
    headtohead.main(["--out", str(rows), "--table", "--plot", str(tmp_path)])
    text = capsys.readouterr().out
    assert "GPT, 12 layers, d=1024, 16 x 1024 tokens, bf16, a tiny version" in text
    assert "refused: the smallest peak is" in text
    assert "of 1 points of the other tools are met" in text
    assert [path.name for path in tmp_path.iterdir()] == ["gpt.svg"]


@pytest.mark.slow
def test_a_row_over_its_limit_is_given_up_and_the_next_one_tried(tmp_path):
    out = tmp_path / "rows.jsonl"
    headtohead.main([*TINY, "--tools", "eager,selective", "--limit", "0.1", "--out", str(out)])
    found = read(out)
    assert [row["tool"] for row in found] == ["eager", "selective"]
    assert all(row["error"] == "no row within 0 s" for row in found)
    assert "error: no row within 0 s" in table(found)


@pytest.mark.slow
def test_nothing_is_started_after_the_deadline(tmp_path):
    out = tmp_path / "rows.jsonl"
    headtohead.main([*TINY, "--tools", "eager", "--deadline", "0", "--out", str(out)])
    assert read(out) == []


@pytest.mark.slow
def test_a_process_that_fails_leaves_a_row_and_the_rest_goes_on(tmp_path, monkeypatch):
    def fail(command, **options):
        return popen([sys.executable, "-c", "import sys; sys.exit(3)"], **options)

    popen = subprocess.Popen
    monkeypatch.setattr(headtohead.subprocess, "Popen", fail)
    out = tmp_path / "rows.jsonl"
    headtohead.main([*TINY, "--tools", "eager,checkpoint", "--out", str(out)])
    assert [row["error"] for row in read(out)] == 2 * ["the process ended with exit status 3"]


def test_rows_to_redo():
    wanted = keys(["gpt"], ["compile"], ["1.0", "0.5", "0.0"])
    found = [{"model": "gpt", "tool": "compile", "setting": name} for name in ("1.0", "0.5", "1.0")]
    found[1]["error"] = "out of memory"
    left = {
        (again, before): [
            known[2] for known in headtohead.missing(wanted, found[:before], again=again, before=before)
        ]
        for again in ("none", "errors", "all")
        for before in (2,)
    }
    assert left["none", 2] == ["0.0"]
    assert left["errors", 2] == ["0.5", "0.0"]
    assert left["all", 2] == ["1.0", "0.5", "0.0"]
    assert headtohead.missing(wanted, found, again="all", before=2) == wanted[1:]


def test_settings_choose_among_those_of_tools_that_have_any():
    assert keys(["gpt"], ["eager", "compile", "lowtide-eager"], ["0.5", "min"]) == [
        ("gpt", "eager", ""),
        ("gpt", "compile", "0.5"),
        ("gpt", "lowtide-eager", "min"),
    ]
    assert len(keys(MODELS, list(TOOLS))) == 8 * (3 + 6 + 2 * 7)


@pytest.mark.parametrize("arguments", [["--tools", "egaer"], ["--models", "gtp"], ["--tiny"]])
def test_what_cannot_be_meant_is_refused(arguments, capsys):
    with pytest.raises(SystemExit):
        headtohead.main(arguments)
    assert "error:" in capsys.readouterr().err


PARAMETERS = {
    "gpt": 255,
    "llama_1b": 1236,
    "vit_b16": 87,
    "bert_base": 110,
    "resnet50": 26,
    "resnet50_184": 26,
    "unet": 31,
    "densenet161": 29,
}
BLOCKS = {
    "gpt": 12,
    "llama_1b": 16,
    "vit_b16": 12,
    "bert_base": 12,
    "resnet50": 16,
    "resnet50_184": 16,
    "unet": 9,
    "densenet161": 4,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_the_models_have_their_size_and_blocks(name):
    model, batch = SUBJECTS[name].build("meta")
    assert round(sum(p.numel() for p in model.parameters()) / 1e6) == PARAMETERS[name]
    assert len(blocks(model)) == BLOCKS[name]
    dtypes = {part.dtype for part in (*model.parameters(), *batch) if part.is_floating_point()}
    assert dtypes == {SUBJECTS[name].dtype}


def stand(name):
    return Stand(*SUBJECTS[name].build("cpu", tiny=True))


def flops(one, name):
    with FlopCounterMode(display=False) as counter, tool(name, one.model, "") as call:
        one.step(call)
    return counter.get_total_flops()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "resnet50"])
def test_checkpointing_repeats_the_blocks_and_the_selective_one_no_product(name):
    one = stand(name)
    plain = flops(one, "eager")
    assert flops(one, "checkpoint") > 1.05 * plain
    assert flops(one, "selective") == plain
    assert flops(one, "eager") == plain


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert_base", "unet", "densenet161"])
@pytest.mark.parametrize("tool_name", ["checkpoint", "selective"])
def test_checkpointed_gradients_are_those_of_the_plain_model(name, tool_name):
    one = stand(name)
    assert one.random == (name != "densenet161")
    right = one.outcome(one.model).kept()
    with tool(tool_name, one.model, "") as call:
        found = one.compare(one.outcome(call), right)
    assert found["gradients"] == "ok"
    assert found.get("buffers") == ("wrong" if name == "densenet161" else None)


def test_gradients_are_wrong_beyond_the_tolerance_unless_other_numbers_were_drawn():
    one = stand("bert_base")
    right = one.outcome(one.model).kept()
    assert one.compare(one.outcome(one.model), right)["gradient_difference"] == 0

    def changed(factor, **more):
        off = {name: gradient * factor for name, gradient in right.gradients.items()}
        return one.compare(replace(right, gradients=off, **more), right)

    assert changed(1.05)["gradients"] == "ok"
    assert changed(1.5)["gradients"] == "wrong"
    assert changed(1.5)["gradient_difference"] == pytest.approx(0.5, rel=0.02)
    assert changed(math.nan)["gradients"] == "wrong"
    assert changed(math.nan)["gradient_difference"] is None
    assert changed(1.5, drawn=right.drawn + 1)["gradients"] == "n/a"


def test_budgets_are_whole_bytes():
    assert budget_of("35%", 1001) == 350
    assert budget_of("min", None) == "min"
    assert budget_of("uncapped", None) == "100% of device"
    with pytest.raises(ValueError, match="no uncapped peak"):
        budget_of("35%", None)


def is_free(lock, kind="LOCK_EX"):
    """Whether another process could take a lock at once."""
    code = f"import fcntl, sys; file = open(sys.argv[1]); fcntl.flock(file, fcntl.{kind} | fcntl.LOCK_NB)"
    command = [sys.executable, "-c", code, str(lock)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_a_turn_keeps_others_out_and_may_be_taken_twice(tmp_path):
    turn = Turn(tmp_path / "lock")
    with turn:
        with turn:
            assert not is_free(tmp_path / "lock")
        assert not is_free(tmp_path / "lock", "LOCK_SH")
    assert is_free(tmp_path / "lock")


SLEEPS = [sys.executable, "-c", "import time; time.sleep(3600)"]
LOOKS = [sys.executable, "-c", "import headtohead_others; print(headtohead_others.others())"]


def test_others_stand_still_while_one_takes_times(monkeypatch):
    with subprocess.Popen(SLEEPS) as other:
        monkeypatch.setattr(headtohead_others, "others", lambda: [other.pid])
        try:
            with headtohead_others.standing_still():
                assert comes_to(other.pid, "T")
            assert comes_to(other.pid, "S")
        finally:
            other.kill()


@pytest.mark.slow
def test_others_are_those_that_the_same_run_has_started(monkeypatch):
    assert headtohead_others.others() == []
    monkeypatch.setenv("PYTHONPATH", str(Path(headtohead_others.__file__).parent))
    with subprocess.Popen(SLEEPS) as other:
        try:
            environment = {**os.environ, **headtohead_others.naming()}
            found = subprocess.run(LOOKS, env=environment, capture_output=True, text=True, check=True)
            assert other.pid in json.loads(found.stdout)
        finally:
            other.kill()


def comes_to(process, state):
    """Whether a process gets to a state, as the kernel tells it: S asleep, T stopped."""
    for _ in range(60_000):
        if Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == state:
            return True
        time.sleep(0.01)
    return False


def test_first_steps_share_the_device_and_leave_it_while_torch_compiles(tmp_path):
    lock, seen = tmp_path / "lock", []

    def backend(module, inputs):
        seen.append(is_free(lock))
        return module

    with Turn(lock).beside_others():
        assert is_free(lock, "LOCK_SH")
        assert not is_free(lock)
        torch.compile(torch.nn.Linear(2, 2), backend=backend)(torch.ones(1, 2))
        assert not is_free(lock)
    assert seen == [True]
    assert is_free(lock)


def test_a_step_that_lowtide_compiles_again_leaves_the_device_too(tmp_path):
    turn = Turn(tmp_path / "lock")
    with turn.beside_others():
        with turn.away():
            assert is_free(tmp_path / "lock")
        assert not is_free(tmp_path / "lock")
    with turn.away():
        assert is_free(tmp_path / "lock")
    assert is_free(tmp_path / "lock")


def test_the_calmest_round_counts():
    rounds = iter([[1.0, 2.0, 3.0, 4.0], [5.0, 5.0, 6.0, 6.0], [1.0, 9.0, 9.0, 20.0]])
    assert calm(lambda: next(rounds)) == {"milliseconds": 5.5, "spread": 1.0}
    rounds = iter([[7.0, 7.0, 7.1, 7.1], [1.0, 1.0, 1.0, 1.0]])
    assert calm(lambda: next(rounds))["milliseconds"] == 7.05


def test_errors_say_no_path_of_the_machine():
    text = without_paths('OSError: no "/home/me/lib/torch/x.py" \n in /a/b.c or 3/4')
    assert text == 'OSError: no "x.py" in b.c or 3/4'


def made_up(tool_name, setting, peak, milliseconds, **more):
    row = {"model": "gpt", "tool": tool_name, "setting": setting, "peak": int(peak * 2**20)}
    return {**row, "milliseconds": milliseconds, "setup_seconds": 1.0, "gradients": "ok", **more}


ROWS = [
    made_up("eager", "", 1000, 50.0),
    made_up("checkpoint", "", 500, 63.0),
    made_up("compile", "1.0", 700, 40.0),
    made_up("compile", "0.0", 600, 52.0, gradients="wrong", gradient_difference=0.7),
    made_up("lowtide-eager", "uncapped", 1000, 51.5),
    made_up("lowtide-inductor", "uncapped", 710, 40.5, budget=800 * 2**20, predicted_peak=705 * 2**20),
    made_up("lowtide-inductor", "60%", 430, 48.0, budget=426 * 2**20),
    made_up("lowtide-inductor", "35%", 300, 70.0),
    {"model": "gpt", "tool": "lowtide-inductor", "setting": "25%", "smallest": 290 * 2**20},
    {"model": "gpt", "tool": "selective", "setting": "", "error": "ValueError: no"},
]


def test_every_point_of_the_others_has_a_verdict():
    verdicts = {key(found.theirs)[1:]: found for found in dominated(ROWS)}
    assert set(verdicts) == {("eager", ""), ("checkpoint", ""), ("compile", "1.0"), ("compile", "0.0")}
    assert all(found.met for found in verdicts.values())
    assert verdicts["compile", "1.0"].ours["setting"] == "uncapped"
    assert verdicts["checkpoint", ""].ours["setting"] == "60%"


def test_two_per_cent_are_equal_and_more_are_not():
    theirs = made_up("compile", "1.0", 700, 40.0)
    for peak, milliseconds, met in ((714, 40.8, True), (715, 40.0, False), (700, 40.9, False)):
        (verdict,) = dominated([theirs, made_up("lowtide-inductor", "80%", peak, milliseconds)])
        assert verdict.met == met
        assert ("NOT MET, nearest is lowtide-inductor 80%" in str(verdict)) != met


def test_what_is_not_met_is_tried_at_its_own_peak():
    near = made_up("lowtide-inductor", "60%", 500, 50.0)
    wanted = ("gpt", "lowtide-inductor", "699MiB")
    assert beside_unmet([made_up("compile", "1.0", 699.5, 40.0), near]) == [wanted]
    assert beside_unmet([*ROWS, near]) == []
    assert budget_of("699MiB", None) == 699 * 2**20
    asked = keys(["gpt"], ["compile", "lowtide-inductor"], ["0.5", "699MiB"])
    assert asked == [("gpt", "compile", "0.5"), wanted]
    sized = made_up("lowtide-inductor", "699MiB", 690, 41.0)
    assert [row["setting"] for row in latest([sized, *ROWS])][-2:] == ["25%", "699MiB"]


def test_the_table_of_verdicts():
    text = verdict_table(ROWS)
    assert "| 4 of 4 | 500 MiB, 63.0 ms | 300 MiB, 70.0 ms | peak -57.0%, time -4.0% |" in text
    assert text.endswith("Every point of the other tools is met.")
    worse = verdict_table([*ROWS[:5], made_up("lowtide-inductor", "60%", 430, 64.0)])
    assert "- GPT: checkpoint [500 MiB, 63.0 ms]: met" not in worse
    assert "- GPT: compile 1.0 [700 MiB, 40.0 ms]: NOT MET, nearest is" in worse


def test_wrong_gradients_of_lowtide_meet_nothing():
    wrong = made_up("lowtide-inductor", "80%", 1, 1.0, gradients="wrong")
    (verdict,) = dominated([ROWS[0], wrong])
    assert not verdict.met
    assert "no point of Lowtide" in str(verdict)


def test_the_verdict_in_words():
    text = verdict_text(ROWS)
    assert "4 of 4 points met" in text
    assert "compile 0.0 [600 MiB, 52.0 ms, wrong gradients]: met by lowtide-inductor 60%" in text
    assert "smallest: lowtide-inductor 35% [300 MiB, 70.0 ms], below the others' checkpoint [500 MiB" in text
    assert "fastest at 45% of eager's peak: lowtide-inductor 60% [430 MiB, 48.0 ms] (peak -57.0%" in text
    worse = [ROWS[1], made_up("lowtide-eager", "min", 600, 10.0)]
    assert "NOT BELOW" in verdict_text(worse)
    assert "0 of 1 points of the other tools are met" in verdict_text(worse)


def test_the_table():
    lines = table(ROWS).splitlines()
    assert lines[0] == "**GPT, 12 layers, d=1024, 16 x 1024 tokens, bf16**"
    assert lines[4] == "| PyTorch |  |  |  | 1,000 |  | 50.0 | 1.0 | ok |"
    assert lines[6].endswith("| error: ValueError: no |  |  |  |  |")
    assert "| 600 (-40.0%) |  | 52.0 (+4.0%) | 1.0 | wrong (0.7) |" in lines[8]
    assert "| 60% | 426 |  | 430 (over its budget) (-57.0%) |" in lines[11]
    assert "refused: the smallest peak is 290" in lines[13]
    assert all(line.count("|") == lines[2].count("|") for line in lines[2:])


def test_the_last_row_of_a_kind_counts(tmp_path):
    path = tmp_path / "rows.jsonl"
    for row in (ROWS[1], ROWS[0], {**ROWS[0], "peak": 7}):
        append(row, path)
    assert [json.loads(line)["peak"] for line in path.read_text().splitlines()][-1] == 7
    assert [(row["tool"], row["peak"]) for row in latest(read(path))] == [
        ("eager", 7),
        ("checkpoint", ROWS[1]["peak"]),
    ]


SVG = "{http://www.w3.org/2000/svg}"


def test_the_picture_shows_every_point_by_the_shape_of_its_tool():
    ran = [row for row in ROWS if "peak" in row]
    root = Xml.fromstring(picture("<a model>", ran))
    marks = [path for path in root.iter(f"{SVG}path") if path.get("class", "").startswith("point")]
    shown = [mark for mark in marks if mark.find(f"{SVG}title") is not None]
    assert len(shown) == len(ran)
    shapes = {mark.get("class"): mark.get("d") for mark in marks}
    assert len(set(shapes.values())) == len(shapes) == 5
    for mark in marks:
        x, y = map(float, re.findall(r"[\d.]+", mark.get("transform")))
        assert 0 < x < WIDTH
        assert 0 < y < HEIGHT
    hollow = [mark for mark in shown if mark.get("fill") == "#ffffff"]
    assert len(hollow) == 1
    assert "wrong gradients" in hollow[0].find(f"{SVG}title").text
    texts = [element.text for element in root.iter(f"{SVG}text")]
    assert {"60%", "35%", "Lowtide, Inductor", "PyTorch", "hollow: wrong gradients"} <= set(texts)


def test_more_memory_lies_further_right_and_more_time_further_up():
    root = Xml.fromstring(picture("model", ROWS[:2]))
    marks = [path for path in root.iter(f"{SVG}path") if path.find(f"{SVG}title") is not None]
    assert [mark.get("class") for mark in marks] == ["point eager", "point checkpoint"]
    places = [[float(x) for x in re.findall(r"[\d.]+", mark.get("transform"))] for mark in marks]
    assert places[0][0] > places[1][0]
    assert places[0][1] > places[1][1]  # downwards: the faster one is lower


def test_the_frontier_is_what_nothing_beats_as_a_staircase():
    rows = [row for row in ROWS if row["tool"] == "lowtide-inductor" and "peak" in row]
    beaten = made_up("lowtide-inductor", "80%", 500, 49.0)
    assert [row["setting"] for row in frontier([*rows, beaten])] == ["35%", "60%", "uncapped"]
    root = Xml.fromstring(picture("model", [*rows, beaten]))
    (line,) = [path for path in root.iter(f"{SVG}path") if "frontier" in path.get("class", "")]
    assert re.fullmatch(r"M[\d.,]+(H[\d.]+V[\d.]+){2}", line.get("d"))


def test_the_blocks_at_the_peak_are_those_that_took_most_together():
    events = [("alloc", 1, 5), ("alloc", 2, 7), ("free_completed", 1, 5), ("alloc", 3, 4), ("alloc", 4, 3)]
    events += [("free_completed", 2, 7), ("alloc", 1, 6), ("free_completed", 9, 1)]
    found = at_the_peak({"action": what, "addr": where, "size": size} for what, where, size in events)
    assert [block["addr"] for block in found] == [2, 3, 4]
