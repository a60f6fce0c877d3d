"""One budget, one meaning: every entry makes the same bytes of the same words, on every device."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from graphs import chain, transformer
from lowtide.cli.main import main
from lowtide.devices import memory as asking
from lowtide.devices.memory import DeviceMemory, memory_by_name, memory_of
from lowtide.devices.table import find_device
from lowtide.errors import FormatError
from lowtide.options import Options, limit
from lowtide.planner.budgets import resolve
from lowtide.planner.compare import compare
from lowtide.planner.frontiers import Frontier, frontier
from lowtide.planner.under_budget import plan_graph, settled
from lowtide.plans.planned_step import Plan
from lowtide.units import parse_budget

GIB = 2**30
HOST = 64 * GIB
H200 = find_device("H200").memory
GPU = DeviceMemory("cuda:0", 80 * GIB, lambda: 70 * GIB, ())

Shell = Callable[..., Any]

STEP = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(m for _ in range(8) for m in (nn.Linear(64, 64), nn.Tanh())))

    def forward(self, x):
        return self.layers(x).pow(2).mean()

def make_step(batch_size=8192):
    torch.manual_seed(0)
    return Net(), torch.ones(batch_size, 64)
"""


@pytest.fixture
def step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[nn.Module, torch.Tensor]:
    """The step that is also in net.py, in the present folder, on a host of a known size."""
    monkeypatch.setattr(asking, "total_memory", lambda device: HOST)
    (tmp_path / "net.py").write_text(STEP, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {}
    exec(compile(STEP, "net.py", "exec"), namespace)
    model, x = namespace["make_step"](4096)
    return model, x


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str]) -> Shell:
    """Runs the command; gives what it printed as JSON, or what it said on standard error."""

    def run(*words: str) -> Any:
        capsys.readouterr()
        status = main([*words])
        out, err = capsys.readouterr()
        return json.loads(out) if status == 0 else err

    return run


# what a budget comes to


@pytest.mark.parametrize(
    "device", [DeviceMemory("cpu", HOST), GPU, memory_by_name("H200"), DeviceMemory("x")]
)
@pytest.mark.parametrize(("asked", "size"), [("60%", 600), ("100%", 1000), ("150%", 1500), ("0.1%", 1)])
def test_a_share_is_of_the_uncapped_peak_whatever_the_device(
    asked: str, size: int, device: DeviceMemory
) -> None:
    assert resolve(parse_budget(asked), 1000, device) == size


def test_a_share_of_the_device_is_of_all_of_its_memory() -> None:
    asked = parse_budget("90% of device")
    assert resolve(asked, 1000, GPU) == 72 * GIB
    assert resolve(asked, 1000, memory_by_name("H200")) == H200 * 9 // 10
    assert resolve(asked, 1000, memory_by_name("NVIDIA A100-SXM4-40GB")) == 39 * GIB * 9 // 10
    assert resolve(parse_budget("100% of device"), 1000, GPU) == 80 * GIB


def test_words_and_bytes_are_what_they_were() -> None:
    assert resolve(parse_budget("min"), 1000, GPU) is None
    assert resolve(parse_budget("free"), 1000, GPU) == 70 * GIB
    assert resolve(parse_budget("8GiB"), 1000, GPU) == 8 * GIB
    assert resolve(parse_budget("8GiB"), 1000, DeviceMemory("somewhere")) == 8 * GIB


@pytest.mark.parametrize("asked", ["81GiB", "101% of device", 80 * GIB + 1])
def test_more_than_the_device_has_is_refused(asked: int | str) -> None:
    with pytest.raises(lowtide.BudgetError, match=r"more than the device cuda:0 has \(80\.00 GiB\)"):
        resolve(parse_budget(asked), 1000, GPU)


@pytest.mark.parametrize("asked", ["90% of device", "free"])
@pytest.mark.parametrize("name", ["cpu", "cuda:0", "TPU v99"])
def test_what_only_the_device_knows_is_refused_for_a_graph_alone(asked: str, name: str) -> None:
    with pytest.raises(lowtide.BudgetError, match=rf'budget {asked} .*{name}.*where the step runs.*"50%"'):
        resolve(parse_budget(asked), 1000, memory_by_name(name))


def test_a_cuda_device_that_is_here_is_asked_for_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "cuda_memory", lambda device: GPU)
    monkeypatch.setattr(asking, "total_memory", lambda device: HOST)
    graph, plain = chain(4, 64).replace(device="cuda:0"), chain(4, 64)
    assert memory_of(graph, None) is GPU
    assert memory_of(graph, "H200").total == H200
    assert memory_of(plain, "cpu").total == memory_of(plain, None).total == HOST


# every entry


def bytes_of_entries(model: Any, x: Any, shell: Shell, budget: str) -> dict[str, int | None]:
    """What each entry makes of a budget for the step here."""
    found = {"plan": lowtide.plan(model, x, budget=budget).budget}
    lowtide.cap(model, budget, prices="roofline")
    model(x).backward()
    plan = lowtide.plan_of(model)
    assert plan is not None
    found["cap"] = plan.budget
    lowtide.uncap(model)
    model.zero_grad()
    found["verify"] = lowtide.verify(model, x, budget=budget, prices="roofline").plan.budget
    words = ("net.py:make_step", "--batch-size", "4096", "--json")
    found["lowtide plan"] = shell("plan", *words, "--budget", budget)["budget"]
    found["lowtide verify"] = shell("verify", *words, "--budget", budget)["budget"]
    columns = shell("compare", *words, "--budgets", budget, "--methods", "keep_all")["budgets"]
    found["lowtide compare"] = columns[0]["bytes"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("budget", ["60%", "5 MiB", "knee"])
def test_every_entry_makes_the_same_bytes_of_a_budget(step: Any, shell: Shell, budget: str) -> None:
    model, x = step
    whole = lowtide.plan(model, x)
    size = resolve(settled(parse_budget(budget), whole.graph, DeviceMemory()), whole.peak, DeviceMemory())
    found = bytes_of_entries(model, x, shell, budget)
    found["frontier"] = lowtide.frontier(whole).best(budget).budget
    Path("g.json").write_text(whole.graph.to_json(), encoding="utf-8")
    found["lowtide plan, of a file"] = shell("plan", "g.json", "--budget", budget, "--json")["budget"]
    words = ("g.json", "--budgets", budget, "--methods", "keep_all", "--json")
    found["lowtide compare, of a file"] = shell("compare", *words)["budgets"][0]["bytes"]
    assert found == dict.fromkeys(found, size)


@pytest.mark.slow
def test_every_entry_reads_a_share_of_the_device_here(step: Any, shell: Shell) -> None:
    model, x = step
    found = bytes_of_entries(model, x, shell, "25 % of the device")
    found["largest_batch"] = lowtide.largest_batch(lambda n: (model, x[:n]), "25% of device", most=2).budget
    words = ("net.py:make_step", "--budget", "25% OF device", "--most", "2", "--json")
    found["lowtide batch"] = shell("batch", *words)["budget"]
    assert found == dict.fromkeys(found, HOST // 4)


@pytest.mark.slow
def test_the_backend_makes_the_same_bytes_of_a_budget(step: Any, caplog_lowtide: list[str]) -> None:
    model, x = step
    said, asked = [], ("60%", "8MiB", "25% of device", "knee")
    for budget in asked:
        torch._dynamo.reset()
        options = {"budget": budget, "prices": "roofline"}
        torch.compile(model, backend="lowtide", options=options)(x).backward()
        model.zero_grad()
        said.append(caplog_lowtide[-1])
    sizes = [
        lowtide.plan(model, x, budget=budget).budget for budget in ("60%", "8MiB", "25% of device", "knee")
    ]
    for line, size in zip(said, sizes, strict=True):
        assert size is not None
        assert f"budget {lowtide.units.format_bytes(size)}" in line or "nothing to do" in line, line


@pytest.mark.slow
@pytest.mark.parametrize(
    ("budget", "size"),
    [("60%", None), ("8MiB", 8 << 20), ("50% of device", H200 // 2), ("min", None), ("knee", None)],
)
def test_every_entry_agrees_for_a_device_that_is_absent(
    step: Any, shell: Shell, budget: str, size: int | None
) -> None:
    model, x = step
    plan = lowtide.plan(model, x, device="H200", budget=budget)
    whole = lowtide.plan(model, x, device="H200")
    if budget == "60%":
        size = whole.allocated * 6 // 10
    if budget == "knee":
        size = settled(parse_budget(budget), whole.graph, memory_by_name("H200")).bytes
    assert plan.budget == size
    Path("g.json").write_text(whole.graph.to_json(), encoding="utf-8")
    words = ("--budget", budget, "--json")
    of_step = shell("plan", "net.py:make_step", "--batch-size", "4096", "--device", "H200", *words)
    for found in (of_step, shell("plan", "g.json", *words)):
        read = Plan.from_json(json.dumps(found))
        assert (read.budget, read.peak, read.schedule) == (plan.budget, plan.peak, plan.schedule)
    if budget == "knee":  # on a GPU what its plan reserves, and a thousandth that is left free above it
        assert lowtide.frontier(whole).best(budget).peak * 1024 // 1023 + 1 <= size
    elif budget != "min":
        assert lowtide.frontier(whole).best(budget).budget == size
    if budget != "min":
        assert compare(whole.graph, ["keep_all"], [budget]).budgets == {budget: size}
    if budget == "50% of device":
        batch = lowtide.largest_batch(lambda n: (model, x[:n]), budget, device="H200", most=2)
        assert batch.budget == size


@pytest.mark.slow
def test_the_same_share_on_the_cpu_and_on_a_gpu_is_the_same_part_of_the_peak(step: Any) -> None:
    model, x = step
    for device in (None, "H200", "cpu"):
        whole = lowtide.plan(model, x, device=device)
        assert lowtide.plan(model, x, device=device, budget="60%").budget == whole.allocated * 6 // 10


# planning for a CUDA device


@pytest.mark.slow
def test_a_share_on_cuda_caps_the_step_and_not_the_device() -> None:
    graph = chain(16, 8 << 20).replace(device="cuda:0")
    whole = plan_graph(graph, None, device=GPU)
    plan = plan_graph(graph, "60%", device=GPU)
    assert plan.budget == whole.allocated * 6 // 10
    assert plan.peak <= plan.budget
    roomy = plan_graph(graph, "60% of device", device=GPU)
    assert (roomy.budget, roomy.method) == (48 * GIB, "keep_all")


@pytest.mark.slow
def test_what_was_booked_for_another_plan_is_not_booked_twice() -> None:
    graph = chain(16, 19 << 19).replace(device="cuda:0")
    whole = plan_graph(graph, None, device=GPU)
    assert whole.graph.fixed["allocator"] > 0
    again = plan_graph(whole.graph, "60%", device=GPU)
    assert again == plan_graph(graph, "60%", device=GPU)
    assert again.budget == whole.allocated * 6 // 10


@pytest.mark.slow
def test_a_share_that_the_device_does_not_have_is_noted() -> None:
    small = DeviceMemory("T4", 40 << 20, blocks=())
    plan = plan_graph(chain(16, 8 << 20), "60%", device=small)
    (note,) = plan.notes
    assert "more than the device T4 has (40.00 MiB)" in note
    assert '"90% of device"' in note
    assert plan_graph(chain(16, 8 << 20), "min", device=small).notes == ()
    assert plan_graph(chain(4, 1 << 20), "500%", device=small).notes == ()


def test_a_method_that_fits_when_asked_for_less_is_asked_for_less(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = chain(16, 8 << 20)

    def timid(graph: Any, budget: int) -> Any:
        return lowtide.solve.auto(graph, 0) if budget == 0 else lowtide.solve.keep_all(graph)

    monkeypatch.setitem(lowtide.solve.METHODS, "timid", timid)
    plan = plan_graph(graph, "60%", method="timid")
    assert plan.peak <= plan.budget


# what else counts


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
@pytest.mark.parametrize(
    ("budget", "limits"),
    [("60%", False), ("knee", False), ("60% of device", True), ("8GiB", True), ("free", True)],
)
def test_a_share_of_the_peak_limits_the_step_alone(budget: str, limits: bool, device: str) -> None:
    plan = plan_graph(chain(16, 1 << 20).replace(device=device), budget, device=GPU)
    assert limit(Options.make(budget), plan) == (plan.budget if limits else None)


def train(call: Any, model: nn.Module, x: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(3):
        call(x).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.slow
@pytest.mark.parametrize("entry", ["cap", "backend"])
def test_state_that_comes_later_is_no_part_of_a_share(
    step: Any, entry: str, caplog_lowtide: list[str]
) -> None:
    """A share that the step's smallest peak just fits would refuse any state beside it."""
    model, x = step
    whole, least = lowtide.plan(model, x).peak, lowtide.plan(model, x, budget="min").peak
    budget = f"{100 * least / whole + 0.5:.1f}%"
    optimizer = torch.optim.Adam(model.parameters())
    if entry == "cap":
        lowtide.cap(model, budget, prices="roofline")
        train(model, model, x, optimizer)
    else:
        call = torch.compile(model, backend="lowtide", options={"budget": budget, "prices": "roofline"})
        train(call, model, x, optimizer)
    (said,) = [line for line in caplog_lowtide if "as it was planned" in line]
    assert f"the budget {budget} is of the uncapped peak" in said


@pytest.mark.slow
def test_a_share_of_the_device_counts_state_that_comes_later(step: Any, monkeypatch: Any) -> None:
    model, x = step
    least = lowtide.plan(model, x, budget="min").peak
    monkeypatch.setattr(asking, "total_memory", lambda device: 2 * least)
    lowtide.cap(model, "51% of device", prices="roofline")
    with pytest.raises(lowtide.BudgetTooSmall, match="optimizer"):
        train(model, model, x, torch.optim.Adam(model.parameters()))


@pytest.mark.slow
def test_a_share_is_of_the_exact_step_where_a_sketched_plan_is_followed() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))), torch.randn(2048, 256)
    exact = lowtide.plan(model, x).peak
    lowtide.sketch(model, rate=0.1)
    plan = lowtide.plan(model, x, budget="80%")
    assert plan.sketched
    assert plan.budget == exact * 8 // 10
    followed = lowtide.plan(model, x, budget="80%", plan=plan)
    assert (followed.budget, followed.schedule) == (plan.budget, plan.schedule)


# the knee, and cliffs


@pytest.mark.parametrize(
    "blocks", [None, *(pytest.param(each, marks=pytest.mark.slow) for each in ((), (3 << 20, 200 << 20)))]
)
def test_the_knee_is_the_plan_with_the_least_sum_of_memory_and_time(blocks: tuple[int, ...] | None) -> None:
    graph = transformer(2).replace(device="cuda:0")
    device = DeviceMemory("cuda:0", 80 * GIB, lambda: 70 * GIB, blocks)
    plan = plan_graph(graph, "knee", device=device)
    assert plan.peak <= plan.budget
    plans = frontier(graph)
    sums = [each.peak / plans.vanilla + each.seconds / plans[0].seconds for each in plans]
    assert plans[sums.index(min(sums))] == plans.knee
    assert plans.knee.schedule == plans.best("knee").schedule
    assert plan.seconds <= plans.knee.seconds
    assert device.blocks is not None or plan.schedule == plans.knee.schedule
    assert 0.4 * plans.vanilla < plans.knee.peak < 0.8 * plans.vanilla
    assert plan_graph(graph, "knee", device=device) == plan
    # A method of a paper keeps to the same bytes.
    assert plan_graph(graph, "knee", method="rotor", device=device).peak <= plan.budget


def test_the_knee_is_among_the_plans_that_are_shown() -> None:
    plans = frontier(transformer(2))
    (line,) = [line for line in str(plans).splitlines() if line.endswith("knee")]
    assert f"{plans.knee.extra:+.1%}" in line
    assert all(plans.knee in frontier(transformer(2), points=points) for points in (3, 4, 7))
    assert not any(line.endswith("knee") for line in str(Frontier(plans.plans[:1])).splitlines())


@pytest.mark.parametrize("budget", ["min", 0])
def test_a_budget_just_below_a_cliff_says_what_a_little_more_would_save(budget: int | str) -> None:
    graph = transformer(1)
    least = plan_graph(graph, "min")
    plan = plan_graph(graph, budget or least.peak + 1)
    (note,) = plan.notes
    said = re.search(r"budget of (\d+) .* takes \+(\S+)% of time instead of \+(\S+)%", note)
    assert said
    better = plan_graph(graph, int(said[1]))
    assert better.peak <= int(said[1]) <= least.peak + 0.05 * plan.uncapped.peak
    assert (float(said[2]), float(said[3])) == (round(100 * better.extra, 1), round(100 * plan.extra, 1))
    assert plan.extra > better.extra + 0.03
    assert plan_graph(graph, "90%").notes == plan_graph(graph, "knee").notes == ()
    assert plan_graph(graph, "min", method="chain").notes == ()


def test_the_smallest_peak_is_a_budget_by_that_name() -> None:
    graph = transformer(1)
    least, whole = plan_graph(graph, "min"), plan_graph(graph, None)
    assert (least.budget_in_words, whole.budget_in_words) == ("min", "none")
    assert "budget         min" in str(least)
    assert Plan.from_json(least.to_json()) == least
    for budget, smallest in ((None, 1), (5, True)):
        data = {**least.to_dict(), "budget": budget, "smallest": smallest}
        with pytest.raises(FormatError, match="smallest"):
            Plan.from_dict(data)


@pytest.mark.slow
def test_the_command_line_says_where_the_knee_is(
    step: Any, capsys: pytest.CaptureFixture[str], shell: Shell
) -> None:
    model, x = step
    plan = lowtide.plan(model, x, budget="knee")
    words = ("plan", "net.py:make_step", "--batch-size", "4096", "--budget")
    for budget in ("60%", "knee"):
        assert main([*words, budget]) == 0
        out = capsys.readouterr().out
        share = plan.peak / plan.uncapped.peak
        assert f"Knee: {lowtide.units.format_bytes(plan.peak)} ({share:.1%} of uncapped)" in out
    main([*words, "100%"])
    assert "Knee" not in capsys.readouterr().out  # nothing was searched for


# where a share of the device, or of the peak, says nothing


def test_a_plan_to_follow_has_no_knee(step: Any) -> None:
    model, x = step
    plan = lowtide.plan(model, x, budget="100%")
    with pytest.raises(lowtide.LowtideError, match='budget "knee" asks for the plan at the knee, plan= for'):
        lowtide.plan(model, x, budget="knee", plan=plan)


def test_a_largest_batch_has_no_share_of_a_peak(step: Any, shell: Shell) -> None:
    model, x = step
    with pytest.raises(lowtide.BudgetError, match=r'budget 60% .* grows with the batch.*"90% of device"'):
        lowtide.largest_batch(lambda n: (model, x[:n]), "60%")
    assert "90% of device" in shell("batch", "net.py:make_step", "--budget", "60%")


def test_parts_of_a_step_have_no_share_of_the_device() -> None:
    layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    x = torch.ones(4, 8)
    start = torch.ones(8, requires_grad=True)
    tries: list[Callable[[], Any]] = [
        lambda: lowtide.checkpoint_chain(layers, x, budget="90% of device"),
        lambda: lowtide.scan(lambda h, x: (h + x, h), start, x, budget="9% of device"),
        lambda: lowtide.scan_plan(lambda h, x: (h + x, h), start, x, budget="9% of device"),
        lambda: lowtide.Recurrent(nn.LSTM(8, 8), budget="9% of device"),
        lambda: lowtide.while_scan(lambda h: h, x, lambda h: False, budget="9% of device"),
    ]
    for attempt in tries:
        with pytest.raises(lowtide.BudgetError, match=r"9\d?% of device is not known to"):
            attempt()


@pytest.mark.slow
def test_the_knee_is_that_of_the_exact_step_where_layers_may_be_sketched_or_run_in_chunks() -> None:
    torch.manual_seed(0)
    layers = [m for _ in range(4) for m in (nn.Linear(256, 256), nn.GELU())]
    model, x = nn.Sequential(*layers, nn.Linear(256, 1024)), torch.randn(2048, 256)
    exact = lowtide.plan(model, x, budget="knee").budget
    assert lowtide.plan(model, x, budget="knee", split=True).budget == exact
    lowtide.sketch(model, rate=0.1)
    assert lowtide.plan(model, x, budget="knee").budget == exact
