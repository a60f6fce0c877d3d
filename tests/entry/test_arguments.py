"""Nonsense as an argument, of every public name: refused by name, with what is taken; nothing is accepted."""

import math

import pytest
import torch
from torch import nn

import lowtide
from lowtide.capture.torch_errors import clear_errors
from lowtide.pipeline import way_down


def small():
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


X = torch.randn(3, 4)
PLAN = lowtide.plan(small(), X)


def cell(carry, x):
    return torch.tanh(carry + x), carry


def scan(**options):
    return lowtide.scan(cell, torch.zeros(3, 4, requires_grad=True), torch.randn(5, 3, 4), **options)


def scan_plan(**options):
    return lowtide.scan_plan(cell, torch.zeros(3, 4, requires_grad=True), torch.randn(5, 3, 4), **options)


def while_scan(**options):
    start = torch.zeros(3, 4, requires_grad=True)
    return lowtide.while_scan(lambda c, _: (c + 1, None), start, lambda c: bool(c.sum() < 9), **options)


def sketch(**options):
    return lowtide.sketch(small(), **options)


def noise(**options):
    return lowtide.noise(small(), X, **{"rate": 0.5, **options})


def measure(step=lambda: None, **options):
    return lowtide.measure(step, **options)


def watch(step=lambda: None, plan=PLAN, **options):
    return lowtide.watch(step, plan, **options)


def chain(**options):
    return lowtide.checkpoint_chain(**{"model": small(), "sample": X, **options})


def largest_batch(**options):
    made = {"make": lambda size: (small(), torch.randn(size, 4)), "budget": "4KiB", "most": 2}
    return lowtide.largest_batch(**{**made, **options})


def cap(model=None, **options):
    return lowtide.cap(small() if model is None else model, **{"budget": "1MiB", **options})


def plan(**options):
    return lowtide.plan(small(), X, **options)


def verify(**options):
    return lowtide.verify(small(), X, **{"budget": "100%", **options})


def simulate(graph=PLAN.graph, schedule=PLAN.schedule):
    return lowtide.simulate(graph, schedule)


def frontier(**options):
    return lowtide.frontier(PLAN, **options)


NOTHING = (object(), math.nan, b"8GiB", torch.ones(2), "\x1b[31m", {"a": 1})
NO_FLAG = ("no", "yes", 1, 0, None, *NOTHING)
NO_NUMBER = ("5", True, -1, 0, math.inf, [], *NOTHING)
NO_COUNT = (1.5, *NO_NUMBER)
NO_WORD = (None, True, 1, "no", [], *NOTHING)
NO_FUNCTION = (True, 5, "no", [1], int, *NOTHING)
NO_TENSORS = (5, True, "no", [1], [None], X, *NOTHING)
NO_NAMES = (True, 5, "no", [1], {1: 2}, *NOTHING[:-1])

REFUSED = [
    (scan, "reverse", NO_FLAG),
    (scan, "random", NO_FLAG),
    (scan, "length", NO_COUNT),
    (scan, "slots", NO_COUNT),
    (scan, "chunk", (None, *NO_COUNT)),
    (scan, "graphs", NO_FLAG),
    (scan, "parameters", (None, *NO_TENSORS)),
    (scan_plan, "parameters", (None, *NO_TENSORS)),
    (scan_plan, "reverse", NO_FLAG),
    (while_scan, "random", NO_FLAG),
    (while_scan, "parameters", (None, *NO_TENSORS)),
    (while_scan, "max_steps", NO_COUNT),
    (sketch, "rate", (2, 1.0001, 10**400, *NO_NUMBER)),
    (sketch, "always", NO_FLAG),
    (sketch, "kwargs", NO_NAMES),
    (sketch, "loss", NO_FUNCTION),
    (sketch, "batch", (X, 5, [])),
    (noise, "at", (10**400, *NO_NUMBER)),
    (noise, "kind", (True, 0, "", [], *NOTHING[:3])),
    (noise, "loss", NO_FUNCTION),
    (noise, "kwargs", NO_NAMES),
    (measure, "step", (None, *NO_FUNCTION)),
    (measure, "device", ("mps", "nowhere", "", 0, True, *NOTHING)),
    (measure, "resident", (None, *NO_TENSORS)),
    (watch, "step", (None, *NO_FUNCTION)),
    (watch, "plan", (None, *NO_FUNCTION)),
    (watch, "resident", (None, *NO_TENSORS)),
    (chain, "keep", (5, True, "no", [-1], [1.5], ["a"], [True], *NOTHING[:3])),
    (largest_batch, "make", (None, *NO_FUNCTION)),
    (largest_batch, "executor", NO_WORD),
    (largest_batch, "method", ("x", *NO_WORD)),
    (largest_batch, "most", (None, *NO_COUNT)),
    (largest_batch, "optimizer", (True, 5, "no", [1], *NOTHING)),
    (largest_batch, "progress", NO_FUNCTION),
    (cap, "model", ("no", 5, nn.Linear, [small()], X)),
    (cap, "method", NO_WORD),
    (cap, "executor", NO_WORD),
    (cap, "outputs", NO_WORD),
    (cap, "outside", (False, None, 1.5, -1, [], *NOTHING)),
    (cap, "optimizer", (True, "no", [], (), *NOTHING)),
    (cap, "allow_breaks", NO_FLAG),
    (cap, "step_in_backward", NO_FLAG),
    (cap, "max_plans", (None, *NO_COUNT)),
    (cap, "plan", (True, 5, "no", *NOTHING)),
    (plan, "kwargs", NO_NAMES),
    (plan, "ranks", (1, 10**30, *NO_COUNT)),
    (verify, "kwargs", NO_NAMES),
    (verify, "loss", NO_FUNCTION),
    (simulate, "graph", (None, 5, PLAN, "no")),
    (simulate, "schedule", (None, 5, PLAN, "no")),
    (frontier, "points", (1, *NO_COUNT)),
    (frontier, "progress", NO_FUNCTION),
]


@pytest.mark.parametrize(
    ("verb", "name", "values"), REFUSED, ids=lambda each: getattr(each, "__name__", None)
)
def test_nonsense_is_refused(verb, name, values):
    for value in values:
        with pytest.raises(lowtide.LowtideError) as caught:
            verb(**{name: value})
        said = str(caught.value)
        assert len(said) < 500, said
        assert name in said or verb.__name__ in said or "rows" in said or "batch" in said, said


@pytest.mark.parametrize("verb", [lowtide.plan, lowtide.verify], ids=["plan", "verify"])
def test_what_is_no_step_is_refused(verb):
    for model in (None, 5, "no", nn.Linear, X):
        with pytest.raises(lowtide.LowtideError, match=r"takes a module or a function, not a \w+"):
            verb(model, X, budget="100%")


@pytest.mark.parametrize("kind", [lowtide.Plan, lowtide.Graph, lowtide.Schedule, lowtide.Frontier])
def test_what_is_no_text_is_refused(kind):
    for text in (None, 5, [], X):
        with pytest.raises(lowtide.FormatError):
            kind.from_json(text)


def test_what_is_no_path_is_refused():
    for write in (PLAN.report, PLAN.save):
        for path in (None, 5, "", b"plan.html", [], X):
            with pytest.raises(lowtide.LowtideError, match="takes a path to write to"):
                write(path)


def test_a_generator_of_tensors_is_one():
    module = nn.Linear(4, 4)

    def step(carry, x):
        return torch.tanh(module(carry) + x), None

    start = torch.zeros(3, 4, requires_grad=True)
    carry, _ = lowtide.scan(step, start, torch.randn(5, 3, 4), slots=2, parameters=module.parameters())
    carry.sum().backward()
    assert module.weight.grad is not None


def test_the_hosts_memory_is_not_told_as_a_graph_break(monkeypatch):
    def plan_step(priced):
        raise MemoryError

    monkeypatch.setattr(way_down, "plan_step", plan_step)
    with pytest.raises(MemoryError, match="the host ran out of memory while a step was captured"):
        lowtide.plan(small(), X)
    with pytest.raises(MemoryError, match=r"^$"), clear_errors():
        raise MemoryError  # the step's own
