"""Two ranks under DDP, capped and plain: `test_ddp_ranks.py` runs this and reads what each rank found."""

import json
from pathlib import Path

import torch

import lowtide
from ddp_loops import Net, batches, train
from lighter import forget_compiled_code, spare_the_garbage_collector
from short_search import short_search, steady_prices
from small_models import same

SCENARIOS = {
    "plain": {},
    "bucket views": {"gradient_as_bucket_view": True},
    "no_sync": {"accumulate": 2},
    "views, no_sync": {"accumulate": 2, "gradient_as_bucket_view": True},
    "capped behind the wrapper": {"capped_first": False},
    "other shapes on each rank": {"rows": (256, 192)},
}


def found(rank, scenario):
    loop = dict(scenario)
    rows = loop.pop("rows", (256, 256))[rank]
    weights = []
    for budget in (None, "min"):
        forget_compiled_code()
        spare_the_garbage_collector()
        torch.manual_seed(0)
        model = Net(layers=5)
        data = batches(4, rows=rows, seed=rank)
        weights.append(train(model, data, budget=budget, **loop))
    peak, plan = max(weights[1][1][2:]), lowtide.plan_of(model)
    return {
        "same": same(weights[0][0], weights[1][0]),
        "sum": sum(float(w.double().sum()) for w in weights[1][0]),
        "measured": peak,
        "predicted": plan.peak,
        "uncapped": max(weights[0][1][2:]),
    }


def run(folder, rank):
    """With the process group of `all_ranks.py`."""
    with short_search(), steady_prices():
        facts = {name: found(rank, scenario) for name, scenario in SCENARIOS.items()}
    Path(folder, f"rank{rank}.json").write_text(json.dumps(facts))
