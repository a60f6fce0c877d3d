"""Scenarios of `fully_shard` under a cap, run on each of two ranks: `python fsdp_scenarios.py OUT NAME...`.

Each finds things out and returns them; the tests read and judge them. One start of a process group serves all.
"""

import functools
import json
import logging
import os
import sys
import traceback
from pathlib import Path

import torch
from torch import distributed
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import lowtide

sys.path.insert(0, str(Path(__file__).parent))
from sharded_models import Block, Model, plain_step, same, shard, train  # noqa: E402

SCENARIOS = {}


def scenario(function):
    SCENARIOS[function.__name__] = function
    return function


def compared(make, budget, *, rank, **loop):
    """A loop without and with a cap: whether all is the same, bit for bit, and what it took."""
    before, uncapped, _ = train(make, None, rank=rank, **loop)
    after, peaks, model = train(make, budget, rank=rank, **loop)
    plan = lowtide.plan_of(model)
    return {
        "same": same(before, after),
        "uncapped": uncapped,
        "peaks": peaks,
        "predicted": plan.peak,
        "budget": plan.budget,
        "bands": plan.graph.fixed,
    }


def sharded(policy=None, **options):
    model = {key: options.pop(key) for key in ("tied", "loss", "scaled", "blocks") if key in options}
    if policy is not None:
        options["mp_policy"] = policy
    return lambda: shard(Model(**model), **options)


@scenario
def frees_after_forward(rank):
    return compared(sharded(), "60%", rank=rank)


@scenario
def stays_after_forward(rank):
    return compared(sharded(reshard_after_forward=False), "65%", rank=rank)


@scenario
def root_frees_too(rank):
    return compared(sharded(reshard_after_forward=True), "65%", rank=rank, steps=2)


@scenario
def smallest(rank):
    return compared(sharded(), "min", rank=rank, steps=2)


@scenario
def everything_fits(rank):
    return compared(sharded(), "100%", rank=rank, steps=2)


@scenario
def bfloat16(rank):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return compared(sharded(policy), "70%", rank=rank)


@scenario
def bfloat16_outputs(rank):
    """The root hands out float32, and units get a tensor of another precision by name."""
    inner = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    outer = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)

    def make():
        model = Model(scaled=True)
        for block in model.blocks:
            fully_shard(block, mp_policy=inner)
        return fully_shard(model, mp_policy=outer)

    return compared(make, "75%", rank=rank, steps=2)


def accumulating(model, batch, number):
    last = number % 2 == 1
    model.set_requires_gradient_sync(last)
    model(batch, batch).backward()


@scenario
def accumulation(rank):
    return compared(sharded(), "75%", rank=rank, step=accumulating, steps=4)


@scenario
def accumulation_in_bfloat16(rank):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return compared(sharded(policy), "85%", rank=rank, step=accumulating, steps=4)


@scenario
def tied_weights(rank):
    return compared(sharded(tied=True), "65%", rank=rank, steps=2)


@scenario
def other_shapes(rank):
    return compared(sharded(), "1200KiB", rank=rank, sizes=(8, 8, 3))


@scenario
def loss_outside(rank):
    def step(model, batch, number):
        logits = model(batch)
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.flatten()).backward()

    return compared(sharded(loss=False), "70%", rank=rank, step=step, steps=2)


@scenario
def uneven_parts(rank):
    """Parameters whose first dimension two ranks cannot share evenly are padded."""

    def make():
        model = torch.nn.Sequential(*(Odd() for _ in range(4)))
        for block in model:
            fully_shard(block)
        return fully_shard(model)

    def step(model, batch, number):
        x = torch.nn.functional.one_hot(batch, 40).float()[..., :31]
        model(x).square().mean().backward()

    return compared(make, "85%", rank=rank, step=step, steps=2)


class Odd(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(31, 77)
        self.down = torch.nn.Linear(77, 31)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Pair(torch.nn.Module):
    """A block of two units and a parameter of its own."""

    def __init__(self, width=32):
        super().__init__()
        self.first, self.second = Block(width), Block(width)
        self.scale = torch.nn.Parameter(torch.ones(width))

    def forward(self, x):
        return self.second(self.first(x) * self.scale) * self.scale


@scenario
def units_inside_of_sharded_modules(rank):
    def make():
        model = Model(blocks=0)
        model.blocks = torch.nn.ModuleList(Pair() for _ in range(2))
        for pair in model.blocks:
            fully_shard(pair.first)
            fully_shard(pair.second)
            fully_shard(pair)
        return fully_shard(model)

    return compared(make, "65%", rank=rank, steps=2)


@scenario
def grouped_modules(rank):
    def make():
        model = Model()
        for block in model.blocks:
            fully_shard(block)
        fully_shard([model.norm, model.head])
        return fully_shard(model)

    return compared(make, "70%", rank=rank, steps=2)


@scenario
def embedding_is_a_unit(rank):
    def make():
        model = Model()
        for part in (model.embed, *model.blocks, model.head):
            fully_shard(part)
        return fully_shard(model)

    return compared(make, "70%", rank=rank, steps=2)


@scenario
def prefetches_by_hand(rank):
    def make():
        model = shard(Model())
        blocks = list(model.blocks)
        for one, other in zip(blocks, blocks[1:], strict=False):
            one.set_modules_to_forward_prefetch([other])
            other.set_modules_to_backward_prefetch([one])
        return model

    return compared(make, "65%", rank=rank, steps=2)


@scenario
def frozen_blocks(rank):
    def make():
        model = Model()
        model.embed.requires_grad_(False)
        for block in model.blocks[:2]:
            block.requires_grad_(False)
        return shard(model)

    return compared(make, "80%", rank=rank, steps=2)


@scenario
def announced_optimizer(rank):
    torch.manual_seed(0)
    model = shard(Model())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    lowtide.cap(model, "60%", optimizer=optimizer)
    batch = torch.randint(0, 40, (8, 32))
    found = []
    for _ in range(2):
        plain_step(model, batch, 0)
        found.append(lowtide.plan_of(model).graph.fixed["optimizer"])
        optimizer.step()
        optimizer.zero_grad()
    held = sum(state["exp_avg"].to_local().nbytes for state in optimizer.state.values())
    return {"planned": found, "held": 2 * held + 4 * len(optimizer.state)}


@scenario
def plans_are_shared(rank):
    from lowtide.pipeline import eager_step

    counted = []
    through = eager_step.through_aot
    eager_step.through_aot = lambda *args: (counted.append(1), through(*args))[1]
    try:
        model = shard(Model(blocks=6))
        lowtide.cap(model, "100%")
        plain_step(model, torch.randint(0, 40, (8, 32)), 0)
    finally:
        eager_step.through_aot = through
    return {"captures": len(counted), "units": 6}


@scenario
def too_small(rank):
    model = shard(Model())
    lowtide.cap(model, "100KiB")
    batch = torch.randint(0, 40, (8, 32))
    try:
        model(batch, batch)
    except lowtide.BudgetTooSmall as error:
        told, least = str(error), error.smallest
    lowtide.uncap(model)
    lowtide.cap(model, least)
    peak = lowtide.measure(lambda: model(batch, batch).backward(), device="cpu").peak
    return {"told": told, "least": least, "peak": peak}


@scenario
def uncapped_again(rank):
    model = shard(Model())
    before = {name: vars(part).get("forward") for name, part in model.named_modules()}
    keys = list(model.state_dict())
    lowtide.cap(model, "100%")
    capped_keys = list(model.state_dict())
    lowtide.uncap(model)
    after = {name: vars(part).get("forward") for name, part in model.named_modules()}
    return {"as_before": before == after, "keys": keys == capped_keys}


@scenario
def evaluation(rank):
    torch.manual_seed(0)
    model = shard(Model())
    lowtide.cap(model, "100%")
    batch = torch.randint(0, 40, (8, 32))
    plain_step(model, batch, 0)
    model.eval()
    with torch.no_grad():
        capped = model(batch, batch)
    lowtide.uncap(model)
    with torch.no_grad():
        plain = model(batch, batch)
    return {"same": bool(torch.equal(capped, plain))}


@scenario
def changed_parameters(rank):
    """A step of the optimizer between a forward and its backward would be recomputed from."""
    model = shard(Model())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    lowtide.cap(model, "min")
    batch = torch.randint(0, 40, (8, 32))
    plain_step(model, batch, 0)
    loss = model(batch, batch)
    optimizer.step()
    try:
        loss.backward()
    except lowtide.UnsupportedBackward as error:
        return {"told": str(error)}
    return {"told": ""}


@scenario
def two_calls_in_flight(rank):
    def step(model, batch, number):
        (model(batch, batch) + model(batch.flip(0), batch)).backward()

    return compared(sharded(), "5MiB", rank=rank, step=step, steps=2)


@scenario
def refusals(rank):
    from torch.distributed.fsdp import FullyShardedDataParallel

    told = {}

    def refuse(name, make, **options):
        try:
            lowtide.cap(make(), "1GiB", **options)
        except lowtide.LowtideError as error:
            told[name] = str(error)

    refuse("fsdp1", lambda: FullyShardedDataParallel(Model(), device_id=torch.device("cpu")))
    refuse("no units", lambda: fully_shard(Model()))
    refuse("inductor", lambda: shard(Model()), executor="inductor")
    refuse("no root", lambda: [model := Model(), [fully_shard(block) for block in model.blocks]][0])
    return told


@scenario
def values_outside_of_units(rank):
    class Looking(Model):
        def forward(self, words, targets):
            if self.embed(words).sum().item() > 1e9:
                return None
            return super().forward(words, targets)

    model = shard(Looking())
    lowtide.cap(model, "100%")
    batch = torch.randint(0, 40, (8, 32))
    try:
        model(batch, batch)
    except lowtide.CaptureError as error:
        told = str(error)
    lowtide.uncap(model)
    model(batch, batch).backward()
    return {"told": told}


def main(out, names):
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    logging.getLogger("lowtide").setLevel(logging.ERROR)
    for name in names or SCENARIOS:
        try:
            found = SCENARIOS[name](rank=rank)
        except Exception:
            found = {"raised": traceback.format_exc()}
        everywhere = [None, None]
        distributed.all_gather_object(everywhere, found)
        if rank == 0:
            Path(out, f"{name}.json").write_text(json.dumps(everywhere))
        torch._dynamo.reset()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])

assert functools
assert os
