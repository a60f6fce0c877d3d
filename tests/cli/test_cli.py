from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lowtide
from graphs import chain
from lowtide.cli.arguments import EXECUTORS, VERBS, parse
from lowtide.cli.arguments import METHODS as METHOD_NAMES
from lowtide.cli.main import main
from lowtide.errors import LowtideError
from lowtide.options import _CHOICES
from lowtide.planner.frontiers import Frontier
from lowtide.plans.graph import Graph
from lowtide.plans.keep_all import keep_all
from lowtide.plans.planned_step import Plan
from lowtide.solve import METHODS

GRAPH = chain(16, 1 << 20)

Shell = Callable[..., tuple[int, str, str]]


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    """Runs the command in a folder with g.json; gives status, standard output and standard error."""
    (tmp_path / "g.json").write_text(GRAPH.to_json(), encoding="utf-8")
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> tuple[int, str, str]:
        status = main(list(words))
        return status, *capsys.readouterr()

    return run


def refused(answer: tuple[int, str, str], expected: int = 2) -> str:
    """What the one paragraph on standard error says; lines of the user's own code may stand below it."""
    status, out, err = answer
    assert (status, out) == (expected, "")
    assert err.startswith("lowtide: error: ")
    first, *lines = err.splitlines()
    assert all(line.startswith("  ") for line in lines)
    return first


def too_small(answer: tuple[int, str, str]) -> str:
    """What is said of a budget that cannot be met."""
    return refused(answer, 1)


# plan


def test_plan_prints_its_figures(shell: Shell) -> None:
    status, out, err = shell("plan", "g.json", "--budget", "50%")
    assert (status, err) == (0, "")
    assert "uncapped peak     19.00 MiB" in out
    assert "budget             9.50 MiB" in out
    assert "auto" in out


@pytest.mark.parametrize(
    ("budget", "size"), [("50%", 19 * 2**19), ("9MiB", 9 * 2**20), ("9437184", 9437184), ("2GiB", 2**31)]
)
def test_plan_keeps_to_its_budget(shell: Shell, budget: str, size: int) -> None:
    status, out, _ = shell("plan", "g.json", "--budget", budget, "--json")
    plan = Plan.from_json(out)
    assert status == 0
    assert plan.budget == size
    assert plan.peak <= size
    assert plan.graph == GRAPH


def test_plan_with_room_for_everything_keeps_everything(shell: Shell) -> None:
    plan = Plan.from_json(shell("plan", "g.json", "--budget", "100%", "--json")[1])
    assert (plan.method, plan.schedule) == ("keep_all", keep_all(GRAPH))


def test_plan_min_is_the_smallest_peak(shell: Shell) -> None:
    least = Plan.from_json(shell("plan", "g.json", "--budget", "min", "--json")[1])
    assert least.budget is None
    assert least.peak < 19 * 2**20 // 3
    said = too_small(shell("plan", "g.json", "--budget", str(least.peak - 1)))
    assert f"{least.peak} bytes" in said
    assert shell("plan", "g.json", "--budget", str(least.peak))[0] == 0


def test_plan_tells_what_no_schedule_beats(shell: Shell) -> None:
    out = shell("plan", "g.json", "--budget", "50%", "-o", "plan.json")[1]
    plan = Plan.load("plan.json")
    assert plan.bound == plan.with_bound().bound
    assert plan.gap is not None
    assert f"within {plan.gap:.1%} of the fastest possible" in out
    assert "fastest possible" not in shell("plan", "g.json", "--budget", "min")[1]


def test_plan_by_another_method(shell: Shell) -> None:
    words = ("plan", "g.json", "--budget", "60%", "--method", "sqrt_segments", "--json")
    assert Plan.from_json(shell(*words)[1]).method == "sqrt_segments"


def test_plan_writes_files_and_still_prints(shell: Shell, tmp_path: Path) -> None:
    words = ("plan", "g.json", "--budget", "50%", "-o", "plan.json", "--report", "plan.html")
    assert "predicted peak" in shell(*words)[1]
    assert Plan.load("plan.json").graph == GRAPH
    assert "<html" in Path("plan.html").read_text(encoding="utf-8")
    assert {path.name for path in tmp_path.iterdir()} == {"g.json", "plan.json", "plan.html"}


def test_output_to_a_dash_is_printed(shell: Shell, tmp_path: Path) -> None:
    assert Plan.from_json(shell("plan", "g.json", "--budget", "50%", "-o", "-")[1]).graph == GRAPH
    assert [path.name for path in tmp_path.iterdir()] == ["g.json"]


def test_a_graph_comes_from_standard_input(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "\ufeff" + GRAPH.to_json()  # some editors and shells put a byte order mark in front
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode()), encoding="utf-8"))
    assert Plan.from_json(shell("plan", "-", "--budget", "50%", "--json")[1]).graph == GRAPH
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"{"), encoding="utf-8"))
    assert "standard input: not a graph file" in refused(shell("plan", "-", "--budget", "50%"))


# compare


def test_compare_has_a_row_for_each_method(shell: Shell) -> None:
    status, out, err = shell("compare", "g.json", "--methods", "auto,keep_all,sqrt_segments")
    assert (status, err) == (0, "")
    rows = {line.split()[0]: line.split() for line in out.splitlines()[3:]}
    assert list(rows) == ["auto", "keep_all", "sqrt_segments"]
    assert "19.00 MiB (100.0%)" in out
    assert rows["keep_all"][-6:-2] == ["-"] * 4
    assert rows["auto"][-6].startswith("+")


def test_compare_covers_all_methods_by_default(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "another", keep_all)
    for name in set(METHODS) - {"another", "auto"}:
        monkeypatch.delitem(METHODS, name)
    data = json.loads(shell("compare", "g.json", "--json", "--budgets", "50%")[1])
    assert [row["method"] for row in data["methods"]] == ["auto", "another"]


def test_compare_as_json(shell: Shell) -> None:
    words = ("compare", "g.json", "--methods", "keep_all,auto", "--budgets", "19MiB,60%,1", "--json")
    data = json.loads(shell(*words)[1])
    assert data["peak"] == 19 * 2**20
    assert [item["bytes"] for item in data["budgets"]] == [19 * 2**20, int(0.6 * 19 * 2**20), 1]
    kept, auto = data["methods"]
    assert kept["extra"] == [0.0, None, None]
    assert kept["smallest"] == 19 * 2**20
    assert auto["extra"][0] == 0.0 < auto["extra"][1]
    assert auto["extra"][2] is None
    assert auto["smallest"] < kept["smallest"]
    assert auto["planning"] > 0
    assert auto["error"] is None


def test_compare_counts_the_best_plan_of_a_method_at_each_budget(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A method that fits only when asked for the smallest peak fits all the same."""
    smallest = METHODS["sqrt_segments"](GRAPH, 0)
    monkeypatch.setitem(METHODS, "moody", lambda graph, budget: keep_all(graph) if budget else smallest)
    (row,) = json.loads(shell("compare", "g.json", "--methods", "moody", "--json")[1])["methods"]
    assert row["extra"][0] is not None


def test_compare_gives_the_reason_of_a_method_that_cannot(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    def needs_more(graph: Graph, budget: int) -> Any:
        raise LowtideError("install\nhighspy")

    monkeypatch.setitem(METHODS, "needy", needs_more)
    status, out, _ = shell("compare", "g.json", "--methods", "needy,keep_all")
    assert status == 0
    assert "needy     none: install highspy\n" in out
    (row,) = json.loads(shell("compare", "g.json", "--methods", "needy", "--json")[1])["methods"]
    assert (row["smallest"], row["error"]) == (None, "install highspy")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--methods", "auto,magic"), "'magic' is not known; choose one of auto"),
        (("--methods", "auto,,keep_all"), "--methods 'auto,,keep_all' has an empty item"),
        (("--budgets", ""), "--budgets '' has an empty item"),
        (("--budgets", "50%,lots"), "budget 'lots' cannot be read"),
        (("--budgets", "-5%,50%"), "budget '-5%' is not above zero"),
        (("--budgets", "50%,min"), "the smallest peak of each method is always shown"),
        (("--budgets", "free"), "it is known where the step runs"),
    ],
)
def test_compare_refuses(shell: Shell, words: tuple[str, ...], said: str) -> None:
    assert said in refused(shell("compare", "g.json", *words))


# frontier


def test_frontier_prints_a_table(shell: Shell) -> None:
    status, out, err = shell("frontier", "g.json", "--points", "4")
    assert (status, err) == (0, "")
    assert out.startswith("Frontier of 4 plans")
    assert len(out.splitlines()) == 6


def test_frontier_as_json_and_as_a_file(shell: Shell) -> None:
    _, out, _ = shell("frontier", "g.json", "--json", "-o", "f.json")
    assert Frontier.from_json(out) == Frontier.load("f.json")
    assert Frontier.load("f.json").vanilla == 19 * 2**20


@pytest.mark.parametrize("points", ["1", "-2", "many"])
def test_frontier_needs_two_points(shell: Shell, points: str) -> None:
    assert "points" in refused(shell("frontier", "g.json", "--points", points))


# capture

MODEL = """
import torch
from torch import nn

print("this is not the result")
model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1))

class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = model

    def forward(self, x, *, scale):
        return (self.inner(x) * scale["by"]).sum()

def plain():
    return model, torch.ones(4, 8)

def named():
    return Named(), (torch.ones(4, 8),), {"scale": {"by": torch.ones(1)}}

def neither():
    return model

def nothing():
    return ()

def listed():
    return [model, torch.ones(4, 8)]

def batch_first():
    return torch.ones(4, 8), model

def raises():
    return 1 / 0

def leaves():
    raise SystemExit(3)

def misfit():
    return model, torch.ones(4, 9)

class Odd(nn.Module):
    def forward(self, x):
        raise ValueError("an odd one")

def odd():
    return Odd(), torch.ones(4)

class Missum(nn.Module):
    def forward(self, x):
        return model(x).sum(dim=7)

def missum():
    return Missum(), torch.ones(4, 8)

class Break(nn.Module):
    def forward(self, x):
        return model(x) if x.sum() > 0 else x

def branch():
    return Break(), torch.ones(4, 8)

def untrained():
    return nn.ReLU(), torch.ones(4)

number = 3

def by_name():
    return Named(), {"x": torch.ones(4, 8), "scale": {"by": torch.ones(1)}}

class OneDict(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = model

    def forward(self, batch):
        return self.inner(batch["x"]).sum()

def one_dict():
    return OneDict(), {"x": torch.ones(4, 8)}

class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = model

    def forward(self, x, y):
        return (self.inner(x) - y).sum()

class OneTuple(Pair):
    def forward(self, batch):
        return super().forward(*batch)

def pair(model=Pair):
    return model(), (torch.ones(4, 8), torch.ones(4, 1))

def pair_from_a_loader():
    return Pair(), [torch.ones(4, 8), torch.ones(4, 1)]

def one_tuple():
    return pair(OneTuple)

def half():
    return Pair(), torch.ones(4, 8)

class Levels(OneDict):
    def forward(self, batch):
        return self.inner(batch[0]).sum() + self.inner(batch[1]).sum()

def numbered():
    return Levels(), {0: torch.ones(4, 8), 1: torch.ones(2, 8)}

def numbered_names():
    return Pair(), (torch.ones(4, 8),), {"y": torch.ones(4, 1), 1: torch.ones(4, 1)}
"""


@pytest.fixture
def model_file(shell: Shell, tmp_path: Path) -> Path:
    path = tmp_path / "small_model.py"
    path.write_text(MODEL, encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def forget_imports() -> Any:
    known = set(sys.modules)
    yield
    for name in [name for name in sys.modules if "small_model" in name or name in ("broken", "beside")]:
        if name not in known:
            del sys.modules[name]


def test_capture_then_plan(shell: Shell, model_file: Path) -> None:
    before = list(sys.path)
    status, out, err = shell("capture", "small_model:plain", "-o", "m.json")
    assert (status, err) == (0, "this is not the result\n")
    assert out.startswith("Graph on cpu: ")
    assert "uncapped peak" in out
    assert "note: the loss is computed outside" in out
    graph = Graph.from_json(Path("m.json").read_text(encoding="utf-8"))
    assert {op.module for op in graph.ops} > {"0", "1"}
    assert sys.path == before
    assert shell("plan", "m.json", "--budget", "100%")[0] == 0


def test_plan_of_an_optimizer_that_steps_inside_of_the_backward(shell: Shell, model_file: Path) -> None:
    words = "plan", f"{model_file.name}:plain", "--budget", "100%", "--json", "--optimizer", "SGD"
    plans = [json.loads(shell(*words, *more)[1]) for more in ((), ("--step-in-backward",))]
    updates = [sum("updates" in op for op in plan["graph"]["ops"]) for plan in plans]
    assert updates[0] == 0 < updates[1]
    assert "needs the optimizer" in shell(*words[:-2], "--step-in-backward")[2]
    assert "--step-in-backward is for a step" in refused(
        shell("plan", "graph.json", "--budget", "50%", "--step-in-backward")
    )


def test_capture_of_a_file_in_another_folder(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "small_model.py").write_text("from beside import *\n", encoding="utf-8")
    (tmp_path / "deep" / "beside.py").write_text(MODEL, encoding="utf-8")
    status, out, _ = shell("capture", "deep/small_model.py:plain", "-o", "-", "--device", "H200")
    assert status == 0
    assert Graph.from_json(out).device == "H200"


@pytest.mark.parametrize(
    ("step", "inputs"),
    [
        ("named", 2),
        ("by_name", 2),
        ("one_dict", 1),
        ("numbered", 2),
        ("pair", 2),
        ("pair_from_a_loader", 2),
        ("one_tuple", 2),
    ],
)
def test_capture_of_what_a_step_can_return(shell: Shell, model_file: Path, step: str, inputs: int) -> None:
    assert shell("capture", f"{model_file}:{step}", "-o", "m.json")[0] == 0
    graph = Graph.from_json(Path("m.json").read_text(encoding="utf-8"))
    assert sum(value.kind == "input" for value in graph.values) == inputs


@pytest.mark.parametrize(
    ("step", "said"),
    [
        ("small_model", "MODULE:FUNCTION"),
        (":plain", "MODULE:FUNCTION"),
        ("small_model:", "MODULE:FUNCTION"),
        ("no_such_module:step", "cannot import 'no_such_module': ModuleNotFoundError"),
        ("no_such_file.py:step", "there is no file 'no_such_file.py', seen from "),
        ("g.json:step", "cannot import 'g.json'"),
        ("small_model:absent", "has no function 'absent'; it has plain, named, neither, "),
        ("small_model:number", "has no function 'number'"),
        ("small_model:neither", "must return a tuple: model, *batch"),
        ("small_model:neither", "it returned Sequential"),
        ("small_model:nothing", "it returned tuple"),
        ("small_model:listed", "it returned list"),
        ("small_model:batch_first", "it returned (Tensor, Sequential)"),
        ("small_model:raises", "raises() raised an error: ZeroDivisionError: division by zero"),
        ("small_model:raises", "small_model.py:35)"),
        ("small_model:leaves", "leaves() raised an error: SystemExit: 3"),
        ("small_model:misfit", "the step itself seems to raise an error: RuntimeError("),
        ("small_model:odd", "seems to raise an error: ValueError('an odd one')"),
        ("small_model:odd", "small_model.py:45)"),
        ("small_model:missum", "the step itself seems to raise an error: IndexError('Dimension out of range"),
        ("small_model:missum", "small_model.py:52)"),
        (
            "small_model:numbered_names",
            "returns are for model(*batch, **kwargs): their keys must be names, not 1. A dict",
        ),
        ("small_model:branch", "the step is not one graph"),
        ("small_model:untrained", "gradient"),
        (
            "small_model:half",
            "Pair.forward(x, y) cannot be called with (Tensor): missing a required argument: 'y'",
        ),
    ],
)
def test_capture_refuses(shell: Shell, model_file: Path, step: str, said: str) -> None:
    status, out, err = shell("capture", step, "-o", "m.json")
    assert refused((status, out, err.replace("this is not the result\n", ""))).count(said) == 1
    assert not Path("m.json").exists()


def test_capture_tells_the_line_of_a_module_that_does_not_import(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("x = 1\ny = x + 'a'\n", encoding="utf-8")
    said = refused(shell("capture", "broken:step", "-o", "m.json"))
    assert "cannot import 'broken': TypeError" in said
    assert "broken.py:2)" in said
    (tmp_path / "broken.py").write_text("def step(:\n", encoding="utf-8")
    assert "SyntaxError" in refused(shell("capture", "broken.py:step", "-o", "m.json"))


def test_capture_refuses_an_unknown_device_before_it_imports(shell: Shell, model_file: Path) -> None:
    said = refused(shell("capture", "small_model:plain", "-o", "m.json", "--device", "Z80"))
    assert "'Z80'" in said
    assert "H200" in said


# bad input of any verb


@pytest.mark.parametrize("verb", [("plan", "--budget", "50%"), ("compare",), ("frontier",)])
def test_what_is_no_graph_file_is_refused(shell: Shell, tmp_path: Path, verb: tuple[str, ...]) -> None:
    (tmp_path / "text.json").write_text("hello", encoding="utf-8")
    (tmp_path / "other.json").write_text('{"lowtide": "plan"}', encoding="utf-8")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "bad.json").write_text(GRAPH.to_json().replace('"f3"', '"f2"', 1), encoding="utf-8")
    first, *rest = verb
    for name, said in {
        "absent.json": "cannot read absent.json: No such file",
        ".": "cannot read .: Is a directory",
        "text.json": "text.json: not a graph file",
        "other.json": "other.json: it is a plan: lowtide report shows it",
        "bytes.json": "bytes.json: not a graph file: it is not UTF-8 text",
        "bad.json": "bad.json: values[4] (f2): the name is used twice",
    }.items():
        assert said in refused(shell(first, name, *rest))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--budget", "lots"), "budget 'lots' cannot be read"),
        (("--budget", "-5"), "budget '-5' is not above zero"),
        (("--budget", "-5MiB"), "budget '-5MiB' is not above zero; write an integer of bytes"),
        (("--budget", "-.5GiB"), "budget '-.5GiB' is not above zero"),
        (("--budget", "0"), "not above zero"),
        (("--budget", "free"), "it is known where the step runs"),
        (("--budget", "50%", "--method", "magic"), "'magic' is not known; choose one of auto"),
        (
            ("--budget", "50%", "-o", "no/such/p.json"),
            "cannot write no/such/p.json: there is no folder no/such",
        ),
        (("--budget", "50%", "--report", "."), "cannot write .: it is a folder"),
        (("--budget", "50%", "--colour"), "unrecognized arguments: --colour"),
        ((), "--budget"),
    ],
)
def test_plan_refuses(shell: Shell, words: tuple[str, ...], said: str, tmp_path: Path) -> None:
    assert said in refused(shell("plan", "g.json", *words))
    assert [path.name for path in tmp_path.iterdir()] == ["g.json"]


def test_a_budget_that_cannot_be_met_is_no_bad_input(shell: Shell, tmp_path: Path) -> None:
    said = too_small(shell("plan", "g.json", "--budget", "1KiB", "-o", "p.json"))
    assert "is below the smallest feasible peak found" in said
    said = too_small(shell("plan", "g.json", "--budget", "50%", "--method", "keep_all"))
    assert "is below the smallest feasible peak found, 19.00 MiB" in said
    assert [path.name for path in tmp_path.iterdir()] == ["g.json"]


def test_a_file_that_cannot_be_written_is_an_error(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    said = refused(shell("frontier", "g.json", "-o", "f.json"))
    assert "cannot write f.json: No space left on device" in said


def test_without_a_verb_or_with_an_unknown_one(shell: Shell) -> None:
    assert "VERB" in refused(shell())
    assert "'draw'" in refused(shell("draw"))


def test_version_and_help(shell: Shell, capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in ((["--version"], f"lowtide {lowtide.__version__}\n"), (["plan", "-h"], "--budget")):
        with pytest.raises(SystemExit) as left:
            main(words)
        assert left.value.code == 0
        assert said in capsys.readouterr().out


@pytest.mark.parametrize("verb", ["", *VERBS])
def test_help_fits_a_screen_and_shows_an_example(
    verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main([verb, "--help"] if verb else ["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert f"  lowtide {verb} " in lines[-1] if verb else all(name in "".join(lines) for name in VERBS)


def test_the_examples_in_the_help_are_understood() -> None:
    for verb, (_, _, example, _) in VERBS.items():
        assert parse([verb, *example.split()]).verb == verb


BEFORE_TORCH = """
import sys
from lowtide.cli.arguments import EXECUTORS, VERBS, parse
from lowtide.cli.arguments import METHODS as METHOD_NAMES
from lowtide.cli.main import main
for words in (["--help"], ["plan", "-h"], ["batch", "-h"], ["--version"]):
    try:
        main(words)
    except SystemExit as left:
        assert left.code == 0
for words in sys.stdin.read().splitlines():
    assert main(words.split()) == 2, words
print(sorted({"torch", "numpy"} & set(sys.modules)))
"""


BAD_ARGUMENTS = (
    "",
    "draw",
    "plan",
    "plan g.json --budget lots",
    "plan g.json --budget 1 --device Z80",
    "plan g.json --budget 1 --method magic",
    "plan g.json --budget 1 --executor fast",
    "frontier g.json --points 1",
    "report plan.json",
    "verify model.py:step --budget 0",
    "batch model.py:step --budget 1 --most -1",
    "demo --steps 0",
)


def test_help_and_bad_arguments_come_before_torch() -> None:
    command = [sys.executable, "-c", BEFORE_TORCH]
    words = "\n".join(BAD_ARGUMENTS)
    done = subprocess.run(command, input=words, text=True, check=True, capture_output=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert done.stderr.count("lowtide: error: ") == done.stderr.count("\n") == len(BAD_ARGUMENTS)


def test_the_choices_are_those_of_the_library() -> None:
    assert sorted(METHODS) == list(METHOD_NAMES)
    assert _CHOICES["executor"] == EXECUTORS


def test_sigterm_leaves_quietly_too(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    def terminated(graph: Graph, budget: int) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return keep_all(graph)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setitem(METHODS, "auto", terminated)
    assert shell("plan", "g.json", "--budget", "50%", "-o", "p.json") == (130, "", "")
    assert signal.getsignal(signal.SIGTERM) is before


def test_an_interrupted_write_leaves_no_part_of_a_file(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupted)
    assert shell("frontier", "g.json", "-o", "f.json") == (130, "", "")
    assert [path.name for path in tmp_path.iterdir()] == ["g.json"]


def test_an_interrupt_leaves_quietly(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(graph: Graph, budget: int) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setitem(METHODS, "auto", interrupted)
    assert shell("plan", "g.json", "--budget", "50%", "-o", "p.json") == (130, "", "")
    assert shell("compare", "g.json", "--methods", "keep_all,auto") == (130, "", "")
    assert not Path("p.json").exists()


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # whatever imports it fails
from lowtide.cli.arguments import EXECUTORS, VERBS, parse
from lowtide.cli.arguments import METHODS as METHOD_NAMES
from lowtide.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def without_torch(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT_TORCH, *words]
    return subprocess.run(command, text=True, check=False, stderr=subprocess.PIPE, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [("plan", "-", "--budget", "50%"), ("compare", "-", "--methods", "auto"), ("frontier", "-")]
)
def test_planning_needs_no_torch(words: tuple[str, ...]) -> None:
    done = without_torch(*words, input=GRAPH.to_json(), stdout=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, "")
    assert "19.00 MiB" in done.stdout


@pytest.mark.slow
def test_a_refused_budget_needs_no_torch() -> None:
    done = without_torch("plan", "-", "--budget", "1KiB", input=GRAPH.to_json(), stdout=subprocess.PIPE)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(
        "lowtide: error: budget 1KiB (1024 bytes) is below the smallest feasible peak"
    )


@pytest.mark.slow
def test_a_reader_that_stops_is_no_error(shell: Shell) -> None:
    read, write = os.pipe()
    os.close(read)
    done = without_torch("frontier", "g.json", "--json", stdout=write)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_behind_standard_output_is_told(shell: Shell) -> None:
    with open("/dev/full", "w") as full:
        done = without_torch("frontier", "g.json", stdout=full)
    assert done.returncode == 2
    assert done.stderr == "lowtide: error: cannot write the result: No space left on device\n"


@pytest.mark.slow
def test_a_terminal_without_the_bars_gets_question_marks(shell: Shell) -> None:
    done = without_torch(
        "plan",
        "g.json",
        "--budget",
        "50%",
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "planned   ??" in done.stdout
