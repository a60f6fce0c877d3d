"""A run that was stopped goes on: its rows are in the file as they were made, and are not made again."""

from types import SimpleNamespace

import pytest

import hard_limit
import hard_limit_trial
import language_models
import setup_times
from row_files import append, read, there

FACTS = {"torch": "2.11", "commit": "abc"}


def test_rows_of_the_same_facts_are_there(tmp_path):
    path = tmp_path / "new" / "rows.jsonl"
    assert there(path, ("name",), FACTS) == set()
    for name, commit in (("one", "abc"), ("two", "older")):
        append({**FACTS, "commit": commit, "name": name}, path)
    assert len(read(path)) == 2
    assert there(path, ("name", "budget"), FACTS) == {("one", None)}
    append({}, None)
    assert read(None) == []


def test_a_language_model_goes_on_after_its_last_row(tmp_path, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(language_models, "facts", lambda device: FACTS)
    monkeypatch.setattr(language_models, "clear", lambda device: None)
    monkeypatch.setattr(language_models, "bench", lambda _, setting, *__, **___: asked.append(setting) or {})
    out = tmp_path / "rows.jsonl"
    append({**FACTS, "subject": "llama-3b", "setting": "eager", "error": "out of memory"}, out)
    words = ["", "--tiny", "--subjects", "llama-3b", "--settings", "eager,checkpoint", "--out", str(out)]
    monkeypatch.setattr("sys.argv", words)
    language_models.main()
    language_models.main()
    assert asked == ["checkpoint"]
    assert [row["setting"] for row in read(out)] == ["eager", "checkpoint"]
    assert "checkpoint" in capsys.readouterr().out


def test_what_fails_is_the_result_of_a_row(monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(language_models, "Loop", lambda *_, **__: None)
    monkeypatch.setattr(language_models, "prepare", fail)
    row = language_models.bench(None, "eager", "cpu", steps=1, tiny=True)
    assert row == {"error": "RuntimeError: no such kernel"}
    monkeypatch.setattr(hard_limit_trial, "bytes_of", fail)
    monkeypatch.setattr(hard_limit_trial, "clear", lambda device: None)
    trial = hard_limit_trial.Trial("gpt", ("80%", "min"), "eager", "", tiny=True)
    found = list(hard_limit_trial.outcomes(trial, "cpu"))
    assert [(row["asked"], row["outcome"]) for row in found] == [("80%", "failed"), ("min", "failed")]


def limits(out, **more):
    given = {"only": ["gpt", "unet"], "executors": ["eager"], "settings": [""], "budgets": ["80%", "min"]}
    return SimpleNamespace(**given, tiny=True, traces="", device="cpu", jobs=2, out=out, **more)


def test_the_hard_limit_tries_what_the_file_lacks(tmp_path):
    out = tmp_path / "rows.jsonl"
    for model, asked in (("gpt", "80%"), ("unet", "80%"), ("unet", "min")):
        append({**FACTS, "model": model, "executor": "eager", "setting": "", "asked": asked}, out)
    (trial,) = hard_limit.wanted(limits(out), FACTS)
    assert (trial.model, trial.budgets) == ("gpt", ("min",))
    assert len(list(hard_limit.wanted(limits(out), {**FACTS, "torch": "2.13"}))) == 2


def test_rows_of_models_side_by_side_come_as_they_are_made(monkeypatch):
    waiting = hard_limit.SimpleQueue()

    def rows(trial, device):
        if trial == "slow":
            waiting.get(timeout=60)
        yield {"model": trial}

    monkeypatch.setattr(hard_limit, "in_own_process", rows)
    found = hard_limit.side_by_side(["slow", "quick"], "cpu", 2)
    assert next(found) == {"model": "quick"}
    waiting.put(None)
    assert list(found) == [{"model": "slow"}]


def test_a_process_that_ends_early_leaves_its_rows_and_a_reason(monkeypatch, capsys):
    script = "print('{\"asked\": \"80%\"}', flush=True); raise SystemExit('no device')"
    real = hard_limit.subprocess.Popen
    monkeypatch.setattr(
        hard_limit.subprocess, "Popen", lambda command, **more: real([command[0], "-c", script], **more)
    )
    trial = hard_limit_trial.Trial("gpt", ("80%", "min"), "eager", "")
    first, last = hard_limit.in_own_process(trial, "cpu")
    assert first == {"asked": "80%"}
    assert (last["outcome"], last["error"]) == ("failed", "exit status 1: no device")
    assert "no device" in capsys.readouterr().err


@pytest.mark.parametrize("there", [True, False])
def test_set_up_times_leave_out_models_that_are_done(tmp_path, monkeypatch, capsys, there):
    out, asked = tmp_path / "rows.jsonl", []
    stages = dict.fromkeys((*setup_times.STAGES, "total"), 1.0)
    facts = {"torch": setup_times.torch.__version__, "commit": setup_times.commit()}
    row = {"model": "vit", "ops": 9, "process": 2, "cap": 2, "stages": stages, "eager": 0.1}
    row |= {**facts, "device": "cpu", "prices": "measured"}
    monkeypatch.setattr(setup_times, "rows_of", lambda name, *_: asked.append(name) or iter([row]))
    if there:
        append({"label": "now", **row}, out)
    setup_times.main(["--only", "vit", "--label", "now", "--out", str(out)])
    assert asked == ([] if there else ["vit"])
    assert len(read(out)) == 1
    capsys.readouterr()
