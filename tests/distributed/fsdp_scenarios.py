"""Scenarios of `fully_shard` under a cap, run on each of two ranks.

Each finds things out and returns them; the tests read and judge them.
"""

import json
import logging
import traceback
from itertools import pairwise
from pathlib import Path

import torch
from sharded_models import Block, Model, plain_step, same, shard, train
from torch import distributed
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import lowtide
from lighter import forget_compiled_code, spare_the_garbage_collector
from short_search import short_search, steady_prices

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
    """The usual way, with dropout, an optimizer, and a last batch that is smaller than the others."""
    return compared(sharded(), "1200KiB", rank=rank, sizes=(8, 8, 3))


def accumulating(model, batch, number):
    model.set_requires_gradient_sync(number % 2 == 1)
    model(batch, batch).backward()


@scenario
def stays_after_forward(rank):
    """Parameters stay whole after the forward, and gradients are synchronised at every second step."""
    return compared(sharded(reshard_after_forward=False, tied=True), "75%", rank=rank, step=accumulating)


@scenario
def bfloat16(rank):
    """The root hands out float32, gradients are summed in it, units get another tensor by name."""
    inner = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    outer = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
    )

    def make():
        model = Model(scaled=True)
        for block in model.blocks:
            fully_shard(block, mp_policy=inner)
        return fully_shard(model, mp_policy=outer)

    return compared(make, "85%", rank=rank, step=accumulating)


@scenario
def smallest(rank):
    return compared(sharded(reshard_after_forward=True), "min", rank=rank, steps=2)


class Padded(Model):
    """Its blocks get a mask where a batch is padded, and none where it is not."""

    def forward(self, words, targets):
        x, mask = self.embed(words), words > 3
        scale = None if mask.all() else mask[..., None].to(x.dtype)
        for block in self.blocks:
            x = block(x, scale=scale)
        return torch.nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


@scenario
def padded_or_not(rank):
    """Some batches are padded, on one rank or the other."""

    def step(model, batch, number):
        batch.clamp_(min=4 if (number + rank) % 2 else 0)  # in place: a copy would be the loop's, in no plan
        model(batch, batch).backward()

    return compared(lambda: shard(Padded()), "85%", rank=rank, step=step)


@scenario
def everything_fits(rank):
    """Loss outside of the model; nothing is recomputed."""

    def step(model, batch, number):
        logits = model(batch)
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.flatten()).backward()

    return compared(sharded(loss=False), "100%", rank=rank, step=step, steps=2)


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


class Leaving(Block):
    """A block that leaves what it computed with its caller, as caches of keys and values do."""

    def forward(self, x, cache):
        cache.kept.append(self.norm(x))
        return super().forward(x)


class Cache:
    def __init__(self):
        self.kept = []


class Caching(Model):
    def forward(self, words, targets):
        x, cache = self.embed(words), Cache()
        for block in self.blocks:
            x = block(x, cache)
        return self.head(self.norm(x)).square().mean(), cache


@scenario
def leaves_tensors_in_a_cache(rank):
    def make():
        model = Caching(blocks=0)
        model.blocks = torch.nn.ModuleList(Leaving(32) for _ in range(3))
        return shard(model)

    def step(model, batch, number):
        loss, _cache = model(batch, batch)
        loss.backward()

    return compared(make, "75%", rank=rank, step=step, steps=2)


@scenario
def units_inside_of_sharded_modules(rank):
    """Sharded modules with units inside, and two modules that are gathered together."""

    def make():
        model = Model(blocks=0)
        model.blocks = torch.nn.ModuleList(Pair() for _ in range(2))
        for pair in model.blocks:
            fully_shard(pair.first)
            fully_shard(pair.second)
            fully_shard(pair)
        fully_shard([model.norm, model.head])
        return fully_shard(model)

    return compared(make, "70%", rank=rank, steps=2)


@scenario
def frozen_and_prefetched(rank):
    """The embedding is a unit, some units are frozen, and the user says what is gathered ahead."""

    def make():
        model = Model()
        model.embed.requires_grad_(False)
        model.blocks[0].requires_grad_(False)
        for part in (model.embed, *model.blocks, model.head):
            fully_shard(part)
        blocks = list(model.blocks)
        for one, other in pairwise(blocks):
            one.set_modules_to_forward_prefetch([other])
            other.set_modules_to_backward_prefetch([one])
        return fully_shard(model)

    return compared(make, "75%", rank=rank, steps=2)


@scenario
def announced_optimizer(rank):
    """State that is announced is counted before it is there; units that are alike are made once."""
    from lowtide.pipeline import eager_step

    model = shard(Model())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    lowtide.cap(model, "100%", optimizer=optimizer)
    batch = torch.randint(0, 40, (8, 32))
    found, made = [], []
    through = eager_step.through_aot
    eager_step.through_aot = lambda *args: (made.append(1), through(*args))[1]
    for _ in range(2):
        plain_step(model, batch, 0)
        found.append(lowtide.plan_of(model).graph.fixed["optimizer"])
        optimizer.step()
        optimizer.zero_grad()
    eager_step.through_aot = through
    held = sum(state["exp_avg"].to_local().nbytes for state in optimizer.state.values())
    return {"planned": found, "held": 2 * held + 4 * len(optimizer.state), "captures": len(made)}


@scenario
def too_small_then_changed(rank):
    """A budget that is too small, then one that is not, then a step between forward and backward."""
    model = shard(Model())
    forwards = {name: vars(part).get("forward") for name, part in model.named_modules()}
    keys = list(model.state_dict())
    batch = torch.randint(0, 40, (8, 32))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    lowtide.cap(model, "100KiB")
    found = {"keys": list(model.state_dict()) == keys}
    try:
        model(batch, batch)
    except lowtide.BudgetTooSmall as error:
        found |= {"told": str(error), "least": error.smallest, "parts": error.parts}
    lowtide.uncap(model)
    found["as_before"] = {name: vars(part).get("forward") for name, part in model.named_modules()} == forwards
    lowtide.cap(model, "min")
    found["peak"] = lowtide.measure(lambda: model(batch, batch).backward(), device="cpu").peak
    found["predicted"] = lowtide.plan_of(model).peak
    model.eval()
    with torch.no_grad():
        evaluated = model(batch, batch)
        found["evaluates"] = bool(torch.equal(evaluated, lowtide.uncap(model)(batch, batch)))
    lowtide.cap(model.train(), "min")
    loss = model(batch, batch)
    optimizer.step()
    try:
        loss.backward()
    except lowtide.UnsupportedBackward as error:
        found["refused"] = str(error)
    return found


@scenario
def two_calls_in_flight(rank):
    def step(model, batch, number):
        (model(batch, batch) + model(batch.flip(0), batch)).backward()

    found = compared(sharded(), "4MiB", rank=rank, step=step, steps=2)
    try:
        train(sharded(), "2MiB", rank=rank, step=step, steps=1)
    except lowtide.UnsupportedBackward as error:
        found["told"] = str(error)
    return found


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
    try:
        lowtide.plan(shard(Model()), torch.ones(1, 2, dtype=torch.int64))
    except lowtide.LowtideError as error:
        told["plan"] = str(error)
    refuse("inside", lambda: torch.nn.ModuleDict({"model": shard(Model())}))
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


def run(out, rank):
    """With the process group of `all_ranks.py`."""
    logging.getLogger("lowtide").setLevel(logging.ERROR)
    for name in SCENARIOS:
        forget_compiled_code()
        spare_the_garbage_collector()
        try:
            with short_search(), steady_prices():
                found = SCENARIOS[name](rank=rank)
        except Exception:
            found = {"raised": traceback.format_exc()}
        everywhere = [None, None]
        distributed.all_gather_object(everywhere, found)
        if rank == 0:
            Path(out, f"{name}.json").write_text(json.dumps(everywhere))
